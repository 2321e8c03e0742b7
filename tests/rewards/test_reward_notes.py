"""The facts in the trace of a request that took long: where it waited before its first call, and why."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.reward_agent import Limits, Retry, RewardAgent
from dataflow.rewards.ledger import Ledger
from dataflow.stages.reward import _requests
from tests.test_reward_agent import run, samples

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def _unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need more than 10 ms for what is to be called at once."""
    monkeypatch.setattr("dataflow.rewards.requests._NO_WAIT_S", 0.4)


class Busy(Exception):
    status = 429


async def slow(ground_truth: str, **_others: Any) -> float:
    await asyncio.sleep(0.5)
    return float(ground_truth)


def records(function: Any, groups: int, **options: Any) -> list[dict[str, Any]]:
    async def body() -> list[dict[str, Any]]:
        agent = RewardAgent(function, **options)
        agent.submit(1, samples(groups, n=1))
        rewards = await agent.collect(1, order="index")
        await agent.close()
        return list(rewards.meta["records"])

    found: list[dict[str, Any]] = run(body)
    return found


def test_who_starts_at_once_has_nothing_to_say() -> None:
    assert [set(record) for record in records(slow, 2, limits=Limits(2))] == [{"group", "sample", "begin", "end"}] * 2


def test_who_waits_for_a_slot_says_how_long() -> None:
    first, second = records(slow, 2, limits=Limits(1))
    assert "queued_s" not in first
    assert second["held_by"] == "slot"
    assert second["queued_s"] >= 0.49
    assert second["begin"] - first["begin"] >= 0.49


def test_who_waits_for_the_rate_does_not_blame_the_slots() -> None:
    found = records(slow, 3, limits=Limits(8, rpm=120))  # two at once, then one every half second
    late = [record for record in found if "queued_s" in record]
    assert late
    assert {record["held_by"] for record in late} == {"rate"}


def test_who_was_told_to_slow_down_says_how_often() -> None:
    left = [Busy("later"), Busy("later")]

    async def busy(ground_truth: str, **_others: Any) -> float:
        if left:
            raise left.pop()
        return float(ground_truth)

    (record,) = records(busy, 1, retry=Retry(tries=5, backoff_s=0.01, max_backoff_s=0.01))
    assert (record["tries"], record["throttled"]) == (3, 2)


def test_tries_and_why_they_ended_are_counted_for_the_samples_of_the_step() -> None:
    script = {  # by step and ground truth; then it is scored
        (1, "0"): [Busy("later"), Busy("later")],
        (1, "1"): [Busy("later"), Busy("later"), Busy("later")],
        (1, "2"): [TimeoutError("slow")],
        (2, "0"): [Busy("later")],
    }

    async def scripted(ground_truth: str, extra_info: Any, **_others: Any) -> float:
        await asyncio.sleep(0)
        if left := script.get((extra_info["step"], ground_truth)):
            raise left.pop()
        return 1.0

    async def body() -> tuple[list[dict[str, float]], dict[str, float], dict[str, Any]]:
        retry = Retry(tries=3, backoff_s=0.01, max_backoff_s=0.01)
        agent = RewardAgent(scripted, retry=retry, on_failure="drop_sample", max_failed_share=1.0)
        for step in (1, 2):
            batch = samples(3, n=1)
            truths = {"ground_truth": ["0", "1", "2"], "extra_info": [{"step": step}] * 3}
            agent.submit(step, batch.merge(batch.like(**truths)))
        steps = [(await agent.collect(step)).meta["step"] for step in (2, 1)]
        stats = agent.stats()
        used = agent.used(stats)
        await agent.close()
        return steps, used, stats

    (second, first), used, stats = run(body)
    counted = ("requested", "failed", "retried", "throttled", "timed_out")
    # The last call of the sample that failed was throttled too, and no try followed.
    assert [first[name] for name in counted] == [3, 1, 2 + 2 + 1, 2 + 3, 1]
    assert [second[name] for name in counted] == [3, 0, 1, 1, 0]
    assert used.keys().isdisjoint(counted), "they would take the place of the step's own"
    assert [stats[name] for name in counted] == [6, 1, 6, 6, 1]


@pytest.mark.parametrize("last", ["scored", "failed"])
def test_why_each_try_failed_and_how_long_it_waited_is_in_trace_column_and_ledger(tmp_path: Path, last: str) -> None:
    class Later(Busy):
        retry_after = 0.25

    class Down(Exception):
        status = 500

    left = [Later("later"), Down("crashed"), asyncio.sleep(60)]

    async def troubled(ground_truth: str, **_others: Any) -> float:
        if left:
            trouble = left.pop(0)
            if isinstance(trouble, Exception):
                raise trouble
            await trouble
        return float(ground_truth)

    retry = Retry(tries=4 if last == "scored" else 3, timeout_s=0.2, backoff_s=0)
    with closing(Ledger(tmp_path / "ledger", "run")) as ledger:
        (record,) = records(troubled, 1, retry=retry, ledger=ledger, on_failure="score:0", max_failed_share=1)
    why = "HTTP 429, 0.25 s; HTTP 500, 0 s; time-out" + (", 0 s" if last == "scored" else "")
    assert (record["tries"], record["failed_tries"]) == (retry.tries, why)
    with closing(sqlite3.connect(tmp_path / "ledger")) as db:
        assert db.execute("SELECT failed_tries, score IS NULL FROM request").fetchone() == (why, last == "failed")
    column = _requests(Batch([0], {}, {"records": [record]}))["request_failed_tries"]
    assert list(column) == [why]
