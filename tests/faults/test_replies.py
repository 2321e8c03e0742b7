"""Replies of a judge that are not a score, over real sockets: reported, retried if useful, never scored 0."""

from __future__ import annotations

import pytest

from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.judge.judge import Judge
from tests.faults.rig.samples import check, graded, run, samples
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
