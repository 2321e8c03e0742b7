"""Replies of a judge that are not a score, over real sockets: reported, retried if useful, never scored 0."""

from __future__ import annotations

import pytest

from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.judge.judge import Judge
from tests.faults.rig.samples import check, graded, left_out, run, samples
from tests.faults.rig.server import FaultServer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]

RETRY = Retry(tries=3, timeout_s=10.0, backoff_s=0.01, max_backoff_s=0.05)
GROUPS = range(30)
"""Of two samples each."""

# The mode of the server, the error, its fix, and whether another try may help.
REPLIES = [
    ("none", "has 0 lines 'Score: <number>', not one", "replies with one line 'Score: <0..1>'", False),
    ("nan", "has 0 lines 'Score: <number>', not one: 'Score: nan'", "replies with one line", False),
    ("prose", "not one: 'I like this response a lot.'", "replies with one line", False),
    ("error:429:0", "answered 429: misbehaves on command", "lower reward.rpm", True),
    ("error:400", "answered 400: misbehaves on command", "what the server objects to", False),
    ("half_json", "sent broken JSON", "see that the judge at judge.url is up", True),
    ("reset", "", "see that the judge at judge.url is up and can be reached", True),
    ("status:400", "answered 400: misbehaves on command", "correct what the server objects to", False),
    ("status:401", "answered 401: misbehaves on command", "judge.api_key_env", False),
    ("status:404", "answered 404: misbehaves on command", "correct judge.url or judge.model", False),
    ("status:429:0", "answered 429: misbehaves on command", "lower reward.rpm or reward.concurrency", True),
    ("status:500", "answered 500: misbehaves on command", "see the log of the server at judge.url", True),
    ("status:503", "answered 503: misbehaves on command", "see the log of the server at judge.url", True),
]
replies = pytest.mark.parametrize(("mode", "said", "fix", "again"), REPLIES, ids=[row[0] for row in REPLIES])


def agent_for(server: FaultServer, rule: str = "fail", **options: object) -> RewardAgent:
    more = {"limits": Limits(16), "retry": RETRY, "max_failed_share": 1.0, **options}
    return RewardAgent(Judge(server.url), on_failure=rule, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", [mode for mode, _said, _fix, again in REPLIES if again])
def test_it_passes_where_another_try_may_help(server: FaultServer, mode: str) -> None:
    async def body() -> None:
        before = server.seen()
        server.behave(mode, count=5, every=3)
        agent = agent_for(server, retry=Retry(tries=6, backoff_s=0.01, max_backoff_s=0.05))
        agent.submit(1, samples(1, GROUPS))
        rewards = await agent.collect(1)
        check(rewards, 1, right=graded)
        stats = agent.stats()
        assert (stats["requested"], stats["scored"], stats["failed"], stats["retried"]) == (60, 60, 0, 5)
        assert sum(record.get("tries", 1) - 1 for record in rewards.meta["records"]) == 5
        assert server.seen()["requests"] - before["requests"] == 65, "each was asked once more for each bad reply"
        await agent.close()

    run(body())


@replies
def test_it_ends_the_step_with_the_story_of_the_request(
    server: FaultServer, mode: str, said: str, fix: str, again: bool
) -> None:
    async def body() -> None:
        server.behave(mode)
        agent = agent_for(server)
        agent.submit(1, samples(1, [7], 1))
        with pytest.raises(RewardFailed) as error:
            await agent.collect(1)
        story = str(error.value)
        assert story.startswith("sample 0 of group 7 of step 1: 'compute_score' raised Judge")
        assert said in story
        assert fix in story
        assert ("on each of 3 tries" in story) is again
        assert len(story) < 700
        assert agent.stats()["retried"] == (2 if again else 0)
        server.behave()
        agent.submit(2, samples(2, GROUPS))
        check(await agent.collect(2), 2, right=graded)
        await agent.close()

    run(body())


@pytest.mark.parametrize("rule", ["score:-1", "drop_sample", "drop_group", "replace_group"])
@pytest.mark.parametrize("mode", ["none", "half_json", "reset", "status:400", "status:500"])
def test_a_rule_takes_care_of_the_bad_ones_only(server: FaultServer, mode: str, rule: str) -> None:
    async def body() -> None:
        # One request after another: the 8th, 16th, ... that comes is refused, and that is known to be which sample.
        server.behave(mode, every=8)
        agent = agent_for(server, rule, limits=Limits(1), retry=Retry(tries=1))
        spare = 3 if rule == "replace_group" else 0
        agent.submit(1, samples(1, range(12 + spare)), extra_groups=spare)
        rewards = await agent.collect(1, 12, order="arrival")
        bad = [(3, 1), (7, 1), (11, 1)]
        whole = [group for group in rewards.ids if (group, 1) not in bad]
        check(rewards.select(whole), 1, right=graded)
        if rule == "replace_group":
            assert rewards.ids == (0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14)
        elif rule == "score:-1":
            assert [rewards.select([group])["score"].tolist() for group, _ in bad] == [
                [graded(1, group, 0), -1.0] for group, _ in bad
            ]
        else:
            assert left_out(rewards) == [row for row in _rows(bad) if rule == "drop_group" or row in bad]
        stats = agent.stats()
        assert stats["failed"] == 3
        assert stats["scored"] + stats["failed"] + stats["cancelled"] == stats["requested"]
        await agent.close()

    run(body())


def _rows(bad: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [(group, sample) for group, _ in bad for sample in range(2)]
