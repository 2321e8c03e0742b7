"""A judge that is slow, busy, down for a while or killed: each request ends well, once, or with its history."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.judge.judge import Judge
from dataflow.rewards.ledger import Ledger
from tests.faults.rig.samples import check, graded, left_out, run, samples
from tests.faults.rig.server import FaultServer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]

GROUPS = range(20)
PATIENT = Retry(tries=60, timeout_s=15.0, deadline_s=30.0, backoff_s=0.05, max_backoff_s=0.1)


@pytest.fixture
def mortal() -> Iterator[FaultServer]:
    """A server that may be killed."""
    with FaultServer() as running:
        yield running


def judged(server: FaultServer, retry: Retry, rule: str = "fail", limit: int = 16, **options: object) -> RewardAgent:
    more = {"limits": Limits(limit), "max_failed_share": 1.0, **options}
    return RewardAgent(Judge(server.url, timeout=None), retry=retry, on_failure=rule, **more)  # type: ignore[arg-type]


def ended_well(agent: RewardAgent) -> None:
    stats = agent.stats()
    assert stats["requested"] == stats["scored"]
    assert (stats["failed"], stats["cancelled"], stats["waiting"], stats["running"]) == (0, 0, 0, 0)


def test_a_busy_server_gets_no_request_during_its_retry_after(server: FaultServer) -> None:
    async def body() -> None:
        before = server.seen()["requests"]
        server.behave("status:429:0.5", count=4)
        agent = judged(server, Retry(tries=3, backoff_s=0.01, max_backoff_s=0.01), limit=4)
        agent.submit(1, samples(1, GROUPS))
        await asyncio.to_thread(server.seen, before + 4)
        rewards = await agent.collect(1)
        check(rewards, 1, right=graded)
        records = rewards.meta["records"]
        turned_away = [record for record in records if record.get("tries") == 2]
        assert len(turned_away) == 4, "the four in flight when it was busy, and nobody after them"
        assert all(record["end"] - record["begin"] >= 0.5 for record in turned_away), "Retry-After is obeyed"
        others = [record["begin"] for record in records if "tries" not in record]
        assert min(others) >= min(record["begin"] for record in turned_away) + 0.5, "those in line wait too"
        stats = agent.stats()
        assert (stats["throttled"], stats["retried"], stats["timed_out"]) == (4, 4, 0)
        assert server.seen()["requests"] == before + 44
        ended_well(agent)
        await agent.close()

    run(body())


def test_errors_for_a_while_are_waited_out(server: FaultServer) -> None:
    """500s for 10 s, at a tenth of that."""

    async def body() -> None:
        before = server.seen()["requests"]
        server.behave("status:500")
        agent = judged(server, PATIENT)
        agent.submit(1, samples(1, GROUPS))
        waiting = asyncio.create_task(agent.collect(1))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(server.seen, before + 60)
        assert not waiting.done()
        server.behave()
        rewards = await waiting
        check(rewards, 1, right=graded)
        assert rewards.meta["step"]["retried"] == agent.stats()["retried"] >= 20
        ended_well(agent)
        await agent.close()

    run(body())


@pytest.mark.parametrize("mode", ["hang", "late:3"])
@pytest.mark.parametrize("rule", ["fail", "drop_sample"])
def test_no_answer_or_one_after_the_deadline(server: FaultServer, mode: str, rule: str) -> None:
    async def body() -> None:
        agent = judged(server, Retry(tries=2, timeout_s=1.0, deadline_s=2.5, backoff_s=0.0), rule)
        server.behave(mode, count=2)
        agent.submit(1, samples(1, [9], 1))
        if rule == "fail":
            with pytest.raises(RewardFailed) as error:
                await agent.collect(1)
            story = str(error.value)
            assert story.startswith("sample 0 of group 9 of step 1: 'compute_score' gave no answer within ")
            assert "no answer within 1 s on" in story
            assert "on each of 2 tries" in story
            assert "raise reward.timeout" in story
        else:
            assert left_out(await agent.collect(1)) == [(9, 0)]
        agent.submit(2, samples(2, GROUPS))
        check(await agent.collect(2), 2, right=graded)
        # The late answers have arrived meanwhile, or never will; they are ignored.
        stats = agent.stats()
        assert (stats["scored"], stats["failed"], stats["timed_out"], stats["abandoned"]) == (40, 1, 2, 0)
        await agent.close()
        assert server.seen()["in_flight"] == 0, "who gave up has hung up"

    run(body())


def test_connections_that_break_are_made_anew(server: FaultServer) -> None:
    async def body() -> None:
        server.behave("reset", every=2)
        agent = judged(server, PATIENT)
        for step in (1, 2):
            agent.submit(step, samples(step, GROUPS))
        for step in (2, 1):
            check(await agent.collect(step), step, right=graded)
        assert agent.stats()["retried"] >= 40
        ended_well(agent)
        await agent.close()

    run(body())


def test_a_judge_killed_and_restarted_in_mid_flight(mortal: FaultServer, tmp_path: Path) -> None:
    async def body() -> None:
        ledger = Ledger(tmp_path / "ledger.db", "run")
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
