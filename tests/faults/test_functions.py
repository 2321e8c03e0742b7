"""Reward functions that never return: in the published agent one hangs the last mini-batch."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from dataflow.errors import RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent
from tests.faults.rig.samples import check, left_out, run, samples

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]


@pytest.mark.parametrize(("as_async", "rule"), [(True, "fail"), (False, "drop_sample")], ids=["async", "sync"])
def test_a_call_that_never_returns_holds_up_nobody_for_ever(as_async: bool, rule: str) -> None:
    async def body() -> None:
        go = threading.Event()

        async def hangs(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
            return await asyncio.Event().wait() if extra_info["at"][1:] == (3, 1) else float(ground_truth)

        def blocks(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
            return go.wait(60) if extra_info["at"][1:] == (3, 1) else float(ground_truth)

        retry = Retry(tries=2, timeout_s=1.0, backoff_s=0.01, max_backoff_s=0.01)
        agent = RewardAgent(hangs if as_async else blocks, limits=Limits(4), retry=retry, on_failure=rule)
        agent.submit(1, samples(1, range(8)))
        first = await agent.collect(1, 7)
        check(first, 1)
        assert 3 not in first.ids, "the mini-batches that are whole do not wait for it"
        if rule == "drop_sample":
            last = await agent.collect(1)
            assert (last.ids, left_out(last)) == ((3,), [(3, 1)])
        else:
            story = r"^sample 1 of group 3 of step 1: '.*' gave no answer within 1 s on each of 2 tries"
            with pytest.raises(RewardFailed, match=f"{story}.*raise reward.timeout"):
                await agent.collect(1)
        await asyncio.sleep(0.01)  # a turn later the thread is counted
        stats = agent.stats()
        assert (stats["timed_out"], stats["retried"], stats["failed"]) == (2, 1, 1)
        assert stats["abandoned"] == (0 if as_async else 2), "threads cannot be stopped; they are counted"
        agent.submit(2, samples(2, range(4, 8)))
        check(await agent.collect(2), 2)
        go.set()
        await agent.close()

    run(body())


def test_threads_that_never_return_are_bounded() -> None:
    async def body() -> None:
        go = threading.Event()

        def stuck(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> None:
            go.wait(60)

        retry = Retry(tries=3, timeout_s=0.05, backoff_s=0.0)
        agent = RewardAgent(stuck, limits=Limits(4), retry=retry, on_failure="drop_sample", max_failed_share=1.0)
        agent.submit(1, samples(1, range(20)))
        story = r"5 calls of 'stuck' keep running after their time is over, more than reward\.max_abandoned=4 allows"
        with pytest.raises(RewardFailed, match=story):
            await agent.collect(1)
        with pytest.raises(RewardFailed, match=r"give its own requests a time-out, or raise reward\.timeout"):
            agent.submit(2, samples(2, range(1)))
        assert agent.stats()["abandoned"] <= 8, "no more than were in flight when it was too many"
        go.set()
        await agent.close()

    run(body())
