"""The reward agent: order, bounds, and what its calls refuse. More of it, noun by noun, is in tests/rewards."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.errors import ConfigError, DataflowError, RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent, Ticket
from dataflow.system import clock
from tests.rewards.groups.group_rig import Reward, agent_of, samples
from tests.rigs.virtual_time import run_virtual

pytestmark = pytest.mark.timeout(60)


def late(**seconds: float) -> Reward:
    """A reward whose calls for "_group_sample" take so many seconds; the others return at once."""
    return Reward(**{name: ("after", each) for name, each in seconds.items()})


def plain(solution_str: str, **_: Any) -> float:
    return float(solution_str)


async def quick(solution_str: str, **_: Any) -> float:
    return float(solution_str)


@pytest.mark.parametrize("function", [plain, quick])
def test_scores_come_back_by_group(function: Any) -> None:
    async def body() -> None:
        agent = RewardAgent(function, limits=Limits(4))
        before = clock.now()
        assert agent.submit(1, samples(3, n=4)) == Ticket(1, (0, 1, 2), 12)
        rewards = await agent.collect(1)
        assert rewards.ids == (0, 1, 2)
        assert rewards["score"].tolist() == pytest.approx([g + i / 10 for g in range(3) for i in range(4)])
        assert str(rewards["score"].dtype) == "torch.float32"
        assert rewards.names == ("score",)
        records = rewards.meta["records"]
        assert [(r["group"], r["sample"]) for r in records] == [(g, i) for g in range(3) for i in range(4)]
        assert all(before <= r["begin"] <= r["end"] <= clock.now() + 0.1 for r in records)
        assert rewards.meta["latency_s"] == pytest.approx([r["end"] - r["begin"] for r in records])
        stats = agent.stats()
        names = ("requested", "scored", "failed", "cancelled", "waiting")
        assert [stats[name] for name in names] == [12, 12, 0, 0, 0]
        assert set(stats["latency_s"]) == {"p50", "p95", "p99", "max", "mean"}
        await agent.close()

    asyncio.run(body())


def test_parts_by_arrival_hold_the_groups_that_came_first() -> None:
    async def body() -> None:
        agent = agent_of(late(_3_0=1, _3_1=2, _1_0=1, _1_1=3, _0_0=1, _0_1=5, _2_0=4))
        agent.submit(1, samples(4))
        assert (await agent.collect(1, 2)).ids == (1, 3), "arrived 3, 1; given in order of ids"
        rest = await agent.collect(1)
        assert rest.ids == (0, 2)
        assert len(rest.meta["latency_s"]) == 4
        assert rest.meta["step"]["scored"] == 8
        with pytest.raises(DataflowError, match="step 1 has been collected in full"):
            await agent.collect(1)
        await agent.close()

    run_virtual(body)


def test_parts_by_index_wait_for_the_next_groups_and_are_served_in_the_order_asked() -> None:
    async def body() -> None:
        agent = agent_of(late(_0_0=5))
        agent.submit(1, samples(4, n=1))
        parts = [asyncio.ensure_future(agent.collect(1, 2, order="index")) for _ in range(2)]
        await asyncio.sleep(1)
        assert not any(part.done() for part in parts), "though 2 and 3 are there"
        assert [(await part).ids for part in parts] == [(0, 1), (2, 3)]
        await agent.close()

    run_virtual(body)


def test_steps_are_never_mixed_and_a_straggler_holds_one_slot_only() -> None:
    async def body() -> None:
        agent = agent_of(late(_1_0=100), limits=Limits(2))
        agent.submit(1, samples(2, n=1))
        agent.submit(2, samples(6, n=1, first=10))
        agent.submit("val:1", samples(1, n=1, first=20))
        assert (await agent.collect(2)).ids == tuple(range(10, 16))
        assert (await agent.collect("val:1")).ids == (20,)
        assert (await agent.collect(1, 1)).ids == (0,)
        assert asyncio.get_running_loop().time() < 1
        assert (await agent.collect(1))["score"].tolist() == [1]
        await agent.close()

    run_virtual(body)


def test_older_training_steps_go_first_and_validation_last() -> None:
    async def body() -> None:
        reward = late(_0_0=1)
        agent = agent_of(reward, limits=Limits(1))
        agent.submit(1, samples(1, n=1))
        await asyncio.sleep(0.5)
        agent.submit("val:1", samples(2, n=1, first=90))
        agent.submit(3, samples(2, n=1, first=30))
        agent.submit(np.int64(2), samples(2, n=1, first=20))
        for step in (1, 2, 3, "val:1"):
            await agent.collect(step)
        assert reward.begun == ["0.0", "20.0", "21.0", "30.0", "31.0", "90.0", "91.0"]
        await agent.close()

    run_virtual(body)


def test_sync_functions_run_in_threads_up_to_the_bound() -> None:
    async def body() -> None:
        together = threading.Barrier(5)  # breaks, and so fails, unless five calls run at once
        lock, now, most, names = threading.Lock(), 0, 0, set()

        def score(**_: Any) -> float:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
                names.add(threading.current_thread().name)
            together.wait(timeout=10)
            with lock:
                now -= 1
            return 1.0

        agent = RewardAgent(score, limits=Limits(5))
        agent.submit(1, samples(10))
        assert len(await agent.collect(1)) == 20
        assert most == 5
        assert threading.current_thread().name not in names
        await agent.close()

    asyncio.run(body())


@pytest.mark.parametrize("as_async", [False, True])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (ValueError("boom"), r"raised ValueError: boom \(test_reward_agent\.py:\d+\)"),
        (StopIteration(), "raised "),
        (SystemExit(3), "raised SystemExit: 3"),
        (asyncio.CancelledError(), "raised CancelledError"),
        (None, "returned None; return a finite number"),
        ({"score": math.nan}, "returned a dict whose 'score' is nan; return"),
    ],
)
def test_a_failure_names_the_sample_and_ends_its_step_alone(value: Any, message: str, as_async: bool) -> None:
    def score(solution_str: str, **_: Any) -> Any:
        if solution_str != "2.1":
            return 1.0
        if isinstance(value, BaseException):
            raise value
        return value

    async def awaited(**keywords: Any) -> Any:
        return score(**keywords)

    async def body() -> None:
        awaited.__name__ = "score"
        agent = RewardAgent(awaited if as_async else score, limits=Limits(3), retry=Retry(tries=1))
        agent.submit(12, samples(50))
        agent.submit(13, samples(1))
        parts: list[Coroutine[Any, Any, Batch]] = [agent.collect(12, 25, order="index"), agent.collect(12)]
        for error in await asyncio.gather(*parts, return_exceptions=True):
            assert isinstance(error, RewardFailed)
            assert error.__cause__ is not None
            with pytest.raises(RewardFailed, match=rf"^sample 1 of group 2 of step 12: 'score' {message}"):
                raise error
        with pytest.raises(DataflowError, match="step 12 was submitted before"):
            agent.submit(12, samples(1))
        assert (await agent.collect(13)).ids == (0,)
        stats = agent.stats()
        assert (stats["failed"], stats["cancelled"] > 50) == (1, True)
        assert stats["requested"] == 102 == stats["scored"] + stats["failed"] + stats["cancelled"]
        await agent.close()

    asyncio.run(body())


def test_collects_that_cannot_be() -> None:
    async def body() -> None:
        agent = RewardAgent(quick)
        with pytest.raises(DataflowError, match=r"step 5 was never submitted \(in flight: none\)"):
            await agent.collect(5)
        agent.submit(1, samples(4))
        for k in (5, 0):
            with pytest.raises(DataflowError, match=f"step 1 has 4 groups left to collect, not {k}"):
                await agent.collect(1, k)
        await agent.collect(1, 3)
        with pytest.raises(DataflowError, match="step 1 has 1 groups left to collect, not 2"):
            await agent.collect(1, 2)
        with pytest.raises(DataflowError, match="order 'idx' is unknown"):
            await agent.collect(1, 1, order="idx")  # type: ignore[arg-type]
        assert (await agent.collect(1)).ids == (3,)
        await agent.close()

    run_virtual(body)


def test_submits_that_cannot_be() -> None:
    outside = RewardAgent(quick)
    with pytest.raises(DataflowError, match="step 1 was submitted outside an event loop; submit it in the coroutine"):
        outside.submit(1, samples(1))
    assert not outside.steps.live

    async def body() -> None:
        agent = RewardAgent(quick)
        with pytest.raises(DataflowError, match="step 2 has no samples"):
            agent.submit(2, samples(0))
        with pytest.raises(DataflowError, match="no column 'data_source'"):
            agent.submit(2, Batch([0], {"response_text": ["x"]}))
        await agent.close()
        await agent.close()
        with pytest.raises(DataflowError, match=r"after close\(\)"):
            agent.submit(2, samples(1))

    run_virtual(body)
    with pytest.raises(ConfigError, match="concurrency=0"):
        RewardAgent(quick, limits=Limits(0))
    with pytest.raises(ConfigError, match="give a function or an object with compute_score"):
        RewardAgent(Reward)


def test_whoever_gives_up_waiting_leaves_the_groups() -> None:
    async def body() -> None:
        agent = agent_of(late(_0_0=1, _1_0=2))
        agent.submit(1, samples(2, n=1))
        impatient = asyncio.ensure_future(agent.collect(1, 2))
        await asyncio.sleep(0.5)
        with pytest.raises(DataflowError, match="all groups of step 1 are being collected already"):
            await agent.collect(1)
        impatient.cancel()
        unlucky = asyncio.ensure_future(agent.collect(1, 1))
        await asyncio.sleep(0.4999)
        while agent.steps.live[1].waiters:
            await asyncio.sleep(0)
        unlucky.cancel()  # in the turn of the loop in which it has its group
        ends = await asyncio.gather(impatient, unlucky, return_exceptions=True)
        assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
        assert (await agent.collect(1)).ids == (0, 1)
        await agent.close()

    run_virtual(body)


@pytest.mark.parametrize("closing", [False, True])
def test_cancel_and_close_wake_the_waiters(closing: bool) -> None:
    async def body() -> None:
        reward = Reward(_0_0="never", _1_0="never")
        agent = agent_of(reward, limits=Limits(2))
        agent.submit(1, samples(3, n=1))
        waiting = asyncio.ensure_future(agent.collect(1))
        await asyncio.sleep(1)
        if closing:
            await agent.close()
        else:
            assert (agent.cancel(1), agent.cancel(1)) == (3, 0)
        with pytest.raises(RewardFailed, match="closed" if closing else "step 1: its reward requests were cancelled"):
            await waiting
        await asyncio.sleep(1)
        assert reward.cancelled == ["0.0", "1.0"]
        assert agent.stats()["cancelled"] == 3
        await agent.close()

    run_virtual(body)


def test_a_step_leaves_nothing_to_the_garbage_collector() -> None:
    """Thousands of objects a step that only the collector could free would have it stop the loop, step after step."""

    async def body() -> None:
        agent = RewardAgent(quick, limits=Limits(50))
        for step in (1, 2):
            agent.submit(step, samples(200))
            await agent.collect(step, 150)
            await agent.collect(step)
            await asyncio.sleep(0)
            left = gc.collect()
        assert left < 200
        await agent.close()

    gc.disable()
    try:
        asyncio.run(body())
    finally:
        gc.enable()


def test_extra_columns() -> None:
    async def body() -> None:
        returns = {
            "_0_0": (1, "how?", "so"),
            "_0_1": {"score": True, "tokens": [1, 2], "query": None},
            "_1_0": np.float32(0.5),
        }
        agent = agent_of(Reward(**returns))
        agent.submit(1, samples(2))
        rewards = await agent.collect(1)
        assert rewards["score"].tolist() == pytest.approx([1, 1, 0.5, 1.1])
        assert rewards["query"].tolist() == ["how?", None, None, None]
        assert rewards["explanation"].tolist() == ["so", None, None, None]
        assert rewards["tokens"].tolist() == [None, [1, 2], None, None]
        await agent.close()

    run_virtual(body)
