"""A judge that is slow, down for a while, killed, or replies with no score: each request ends well, once, or with its
history; over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.ledger import Ledger
from tests.faults.rig.samples import check, graded, left_out, run, samples
from tests.faults.rig.server import FaultServer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]

GROUPS = range(20)
"""Of two samples each."""
PATIENT = Retry(tries=60, backoff_s=0.02, max_backoff_s=0.1)


@pytest.fixture
def mortal() -> Iterator[FaultServer]:
    """A server of this test alone, which may be killed."""
    with FaultServer() as running:
        yield running


def judged(server: FaultServer, retry: Retry, rule: str = "fail", limit: int = 16, **options: Any) -> RewardAgent:
    more = {"limits": Limits(limit), "max_failed_share": 1.0, **options}
    return RewardAgent(Judge(server.url), retry=retry, on_failure=rule, **more)


def ended_well(agent: RewardAgent) -> None:
    stats = agent.stats()
    assert stats["requested"] == stats["scored"]
    assert (stats["failed"], stats["cancelled"], stats["waiting"], stats["running"]) == (0, 0, 0, 0)


# The mode of the server, the error, its fix, and whether another try may help.
REPLIES = [
    ("none", "has 0 lines 'Score: <number>', not one", "with one line 'Score: <0..1>'", False),
    ("half_json", "sent broken JSON", "see that the server replies", True),
    ("reset", "", "see that the server is up and can be reached", True),
    ("status:400", "answered 400: misbehaves on command", "correct what it objects to", False),
    ("status:429:0", "answered 429: misbehaves on command", "lower reward.concurrency or reward.rpm", True),
    ("status:500", "answered 500: misbehaves on command", "see the server's log", True),
]


@pytest.mark.parametrize(("mode", "said", "fix", "again"), REPLIES, ids=[row[0] for row in REPLIES])
def test_what_is_no_score_is_asked_for_again_where_that_may_help_and_else_ends_the_step(
    server: FaultServer, mode: str, said: str, fix: str, again: bool
) -> None:
    async def body() -> None:
        server.behave(mode)
        refused = mode.startswith("status:429")
        retry = Retry(tries=6, timeout_s=10.0, deadline_s=3.0 if refused else 60.0, backoff_s=0.01, max_backoff_s=0.05)
        agent = judged(server, retry)
        agent.submit(1, samples(1, [7], 1))
        with pytest.raises(RewardFailed) as error:
            await agent.collect(1)
        story = str(error.value)
        assert story.startswith("sample 0 of group 7 of step 1: 'compute_score' ")
        assert "raised Judge" in story
        assert said in story
        assert fix in story
        assert ("on each of 6 tries" in story) is (again and not refused)
        assert ("its deadline of 3 s" in story) is refused, "a refusal counts as no try"
        before = server.seen()["requests"]
        server.behave(mode, count=5 * again, every=3) if again else server.behave()
        agent.submit(2, samples(2, GROUPS))
        check(await agent.collect(2), 2, right=graded)
        assert server.seen()["requests"] - before == 40 + 5 * again, "each was asked once more for each bad reply"
        await agent.close()

    run(body())


@pytest.mark.parametrize("rule", ["fail", "drop_sample"])
def test_no_answer_before_the_deadline(server: FaultServer, rule: str) -> None:
    async def body() -> None:
        agent = judged(server, Retry(tries=2, timeout_s=1.0, deadline_s=2.5, backoff_s=0.0), rule)
        server.behave("hang", count=2)
        agent.submit(1, samples(1, [9], 1))
        if rule == "fail":
            with pytest.raises(RewardFailed) as error:
                await agent.collect(1)
            story = str(error.value)
            assert story.startswith("sample 0 of group 9 of step 1: 'compute_score' gave no answer within 1 s on each")
            assert "raise reward.timeout" in story
        else:
            assert left_out(await agent.collect(1)) == [(9, 0)]
        agent.submit(2, samples(2, GROUPS))
        check(await agent.collect(2), 2, right=graded)
        stats = agent.stats()
        assert (stats["scored"], stats["failed"], stats["timed_out"], stats["abandoned"]) == (40, 1, 2, 0)
        await agent.close()
        assert server.seen()["in_flight"] == 0, "who gave up has hung up"

    run(body())


def test_a_hedge_beats_a_call_that_hangs(server: FaultServer) -> None:
    async def body() -> None:
        before = server.seen()["requests"]
        server.behave("hang", count=2)
        agent = judged(server, Retry(tries=1, timeout_s=30.0), hedge_after=0.3)
        agent.submit(1, samples(1, GROUPS))
        rewards = await agent.collect(1)
        check(rewards, 1, right=graded)
        hows = [record.get("how") for record in rewards.meta["records"]]
        assert 2 <= hows.count("hedged") <= agent.stats()["hedged"]
        # A hedge may be cancelled before its request is sent.
        assert before + 42 <= server.seen()["requests"] <= before + 40 + agent.stats()["hedged"]
        await agent.close()
        ended_well(agent)
        assert server.seen()["in_flight"] == 0

    run(body())


def test_a_judge_killed_and_restarted_in_mid_flight(mortal: FaultServer, tmp_path: Path) -> None:
    async def body() -> None:
        ledger = Ledger(tmp_path / "ledger.db")
        agent = judged(mortal, PATIENT, limit=8, ledger=ledger)
        agent.submit(1, samples(1, range(8)))
        check(await agent.collect(1), 1, right=graded)
        await asyncio.to_thread(mortal.behave, "hang")
        agent.submit(2, samples(2, GROUPS))
        agent.submit(3, samples(3, GROUPS))
        waiting = {step: asyncio.create_task(agent.collect(step)) for step in (3, 2)}
        await asyncio.to_thread(mortal.seen, 16 + 8)
        await asyncio.to_thread(mortal.kill)
        await asyncio.to_thread(mortal.restart)
        for step, collect in waiting.items():
            check(await collect, step, right=graded)
        seen = mortal.seen()
        assert (seen["requests"], seen["most_alike"]) == (80, 1), "the new one was asked once for each"
        assert agent.stats()["retried"] >= 8
        ended_well(agent)
        assert agent.stats()["scored"] == 96
        await agent.close()

    run(body())


def test_a_judge_that_stays_down_ends_the_run_with_its_address(mortal: FaultServer) -> None:
    async def body() -> None:
        mortal.kill()
        agent = judged(mortal, Retry(tries=3, backoff_s=0.01, max_backoff_s=0.01))
        agent.submit(1, samples(1, GROUPS))
        with pytest.raises(RewardFailed) as error:
            await agent.collect(1)
        story = str(error.value)
        assert mortal.url in story
        assert "on each of 3 tries" in story
        stats = agent.stats()
        assert stats["failed"] + stats["cancelled"] == stats["requested"] == 40
        await agent.close()

    run(body())
