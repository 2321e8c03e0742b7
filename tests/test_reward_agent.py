"""The reward agent: order, bounds, and every way in which a user's function may fail."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.errors import ConfigError, DataflowError, RewardFailed
from dataflow.reward_agent import Limits, Retry, RewardAgent, Ticket
from dataflow.system import clock

pytestmark = pytest.mark.timeout(60)


def samples(groups: int, n: int = 2, first: int = 0, **columns: Any) -> Batch:
    """Rows whose text is "group.sample" and whose truth is the number that scores."""
    rows = [(g, i) for g in range(first, first + groups) for i in range(n)]
    return Batch(
        [g for g, _ in rows],
        {
            "response_text": [f"{g}.{i}" for g, i in rows],
            "data_source": ["d"] * len(rows),
            "ground_truth": [str(g + i / 10) for g, i in rows],
            "extra_info": [{"group": g} for g, _ in rows],
            **columns,
        },
    )


def run(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(20):
            return await test()

    return asyncio.run(limited())


class Gates:
    """An async reward function whose calls end when the test lets them."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.open: dict[str, asyncio.Future[Any]] = {}
        self.changed = asyncio.Event()
        self.now = self.most = 0

    async def compute_score(self, data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        self.started.append(solution_str)
        self.open[solution_str] = asyncio.get_running_loop().create_future()
        self.now += 1
        self.most = max(self.most, self.now)
        self.changed.set()
        try:
            result = await self.open[solution_str]
            return float(ground_truth) if result is None else result
        finally:
            self.now -= 1

    async def running(self, *names: str) -> None:
        while not set(names) <= set(self.started):
            self.changed.clear()
            await self.changed.wait()

    async def let(self, *names: str, result: Any = None) -> None:
        for name in names:
            await self.running(name)
            self.open[name].set_result(result)


async def soon(waiting: Awaitable[Any]) -> asyncio.Task[Any]:
    """Starts to wait, and lets it get as far as it gets."""
    task = asyncio.ensure_future(waiting)
    for _ in range(5):
        await asyncio.sleep(0)
    return task


def plain(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(ground_truth)


async def quick(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(ground_truth)


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
        assert {k: stats[k] for k in ("requested", "scored", "failed", "cancelled", "waiting")} == {
            "requested": 12,
            "scored": 12,
            "failed": 0,
            "cancelled": 0,
            "waiting": 0,
        }
        assert set(stats["latency_s"]) == {"p50", "p95", "p99", "max", "mean"}
        await agent.close()

    run(body)


def test_parts_by_arrival_hold_the_groups_that_came_first() -> None:
    async def body() -> None:
        gates = Gates()
        agent = RewardAgent(gates, limits=Limits(64))
        agent.submit(1, samples(4))
        first = await soon(agent.collect(1, 2))
        await gates.let("3.0", "1.0", "3.1", "0.0")  # group 3 is whole, 1 and 0 are half
        assert not first.done()
        await gates.let("1.1")
        assert (await first).ids == (1, 3), "arrived 3, 1; given in order of ids"
        rest = await soon(agent.collect(1))
        await gates.let("2.0", "2.1", "0.1")
        batch = await rest
        assert batch.ids == (0, 2)
        assert len(batch.meta["latency_s"]) == 4
        assert batch.meta["step"]["scored"] == 8
        with pytest.raises(DataflowError, match="step 1 has been collected in full"):
            await agent.collect(1)
        await agent.close()

    run(body)


def test_parts_by_index_wait_for_the_next_groups() -> None:
    async def body() -> None:
        gates = Gates()
        agent = RewardAgent(gates)
        agent.submit(1, samples(4, n=1))
        first = await soon(agent.collect(1, 2, order="index"))
        second = await soon(agent.collect(1, 2, order="index"))
        await gates.let("3.0", "2.0", "1.0")
        assert not first.done()
        assert not second.done(), "served in the order asked, though 2 and 3 are there"
        await gates.let("0.0")
        assert (await first).ids == (0, 1)
        assert (await second).ids == (2, 3)
        await agent.close()

    run(body)


def test_steps_are_never_mixed_and_collected_in_any_order() -> None:
    async def body() -> None:
        gates = Gates()
        agent = RewardAgent(gates)
        agent.submit(1, samples(2, n=1))
        agent.submit(2, samples(2, n=1, first=10))
        agent.submit("val:1", samples(1, n=1, first=20))
        two = await soon(agent.collect(2))
        await gates.let("20.0", "11.0", "0.0", "1.0", "10.0")
        assert (await two).ids == (10, 11)
        assert (await agent.collect("val:1")).ids == (20,)
        assert (await agent.collect(1))["score"].tolist() == [0, 1]
        await agent.close()

    run(body)


def test_a_straggler_holds_one_slot_only() -> None:
    async def body() -> None:
        gates = Gates()
        agent = RewardAgent(gates, limits=Limits(2))
        agent.submit(1, samples(2, n=1))
        agent.submit(2, samples(6, n=1, first=10))
        await gates.running("0.0", "1.0")
        await gates.let("0.0")
        await gates.let(*(f"{g}.0" for g in range(10, 16)))  # all of step 2 past the straggler 1.0
        assert (await agent.collect(2)).ids == tuple(range(10, 16))
        assert (await agent.collect(1, 1)).ids == (0,)
        await gates.let("1.0")
        assert (await agent.collect(1)).ids == (1,)
        assert gates.most == 2
        await agent.close()

    run(body)


def test_older_training_steps_go_first_and_validation_last() -> None:
    async def body() -> None:
        gates = Gates()
        agent = RewardAgent(gates, limits=Limits(1))
        agent.submit(1, samples(1, n=1))
        agent.submit("val:1", samples(2, n=1, first=90))
        agent.submit(3, samples(2, n=1, first=30))
        agent.submit(np.int64(2), samples(2, n=1, first=20))
        order = ["0.0", "20.0", "21.0", "30.0", "31.0", "90.0", "91.0"]
        await gates.let(*order)
        for step in (1, 2, 3, "val:1"):
            await agent.collect(step)
        assert gates.started == order
        await agent.close()

    run(body)


def test_sync_functions_run_in_threads_up_to_the_bound() -> None:
    async def body() -> None:
        together = threading.Barrier(5)  # breaks, and so fails, unless five calls run at once
        lock, now, most, names = threading.Lock(), 0, 0, set()

        def score(ground_truth: str, **_: Any) -> float:
            nonlocal now, most
            with lock:
                now += 1
                most = max(most, now)
                names.add(threading.current_thread().name)
            together.wait(timeout=10)
            with lock:
                now -= 1
            return float(ground_truth)

        agent = RewardAgent(score, limits=Limits(5))
        agent.submit(1, samples(10))
        assert len(await agent.collect(1)) == 20
        assert most == 5
        assert threading.current_thread().name not in names
        await agent.close()

    run(body)


def returning(value: Any) -> Callable[..., Any]:
    """A function that scores 1 but for sample 1 of group 2, which gets ``value``."""

    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> Any:
        if solution_str == "2.1":
            if isinstance(value, BaseException):
                raise value
            return value
        return 1.0

    return score


FAILURES = [
    (ValueError("boom"), r"raised ValueError: boom \(test_reward_agent\.py:\d+\)"),
    (StopIteration(), "raised "),
    (SystemExit(3), "raised SystemExit: 3"),
    (asyncio.CancelledError(), "raised CancelledError"),
    (None, "returned None; return a finite number"),
    ({"score": math.nan}, "returned a dict whose 'score' is nan; return"),
]


@pytest.mark.parametrize("as_async", [False, True])
@pytest.mark.parametrize(("value", "message"), FAILURES)
def test_a_failure_names_the_sample_and_ends_the_step(value: Any, message: str, as_async: bool) -> None:
    async def body() -> None:
        function = returning(value)

        async def awaited(**keywords: Any) -> Any:
            return function(**keywords)

        awaited.__name__ = "score"
        agent = RewardAgent(awaited if as_async else function, limits=Limits(3), retry=Retry(tries=1))
        agent.submit(12, samples(50))
        agent.submit(13, samples(1))
        for each in [await soon(agent.collect(12, 25, order="index")), await soon(agent.collect(12))]:
            with pytest.raises(RewardFailed, match=rf"^sample 1 of group 2 of step 12: 'score' {message}") as error:
                await each
            assert error.value.__cause__ is not None
        with pytest.raises(DataflowError, match="step 12 was submitted before"):
            agent.submit(12, samples(1))
        assert (await agent.collect(13)).ids == (0,), "other steps continue"
        stats = agent.stats()
        assert stats["failed"] == 1
        assert stats["cancelled"] > 50
        assert stats["requested"] == 102 == stats["scored"] + stats["failed"] + stats["cancelled"]
        await agent.close()

    run(body)


def test_collects_that_cannot_be() -> None:
    async def body() -> None:
        agent = RewardAgent(quick)
        with pytest.raises(DataflowError, match=r"step 5 was never submitted \(in flight: none\)"):
            await agent.collect(5)
        agent.submit(1, samples(4))
        for k in (5, 0, -1):
            with pytest.raises(DataflowError, match=f"step 1 has 4 groups left to collect, not {k}"):
                await agent.collect(1, k)
        await agent.collect(1, 3)
        with pytest.raises(DataflowError, match="step 1 has 1 groups left to collect, not 2"):
            await agent.collect(1, 2)
        with pytest.raises(DataflowError, match="order 'idx' is unknown"):
            await agent.collect(1, 1, order="idx")  # type: ignore[arg-type]
        last = await soon(agent.collect(1))
        assert (await last).ids == (3,)
        await agent.close()

    run(body)


def test_submits_that_cannot_be() -> None:
    async def body() -> None:
        agent = RewardAgent(quick)
        agent.submit(1, samples(1))
        with pytest.raises(DataflowError, match="step 1 was submitted before"):
            agent.submit(1, samples(1))
        with pytest.raises(DataflowError, match="step 2 has no samples"):
            agent.submit(2, samples(0))
        with pytest.raises(DataflowError, match="no column 'data_source'"):
            agent.submit(2, Batch([0], {"response_text": ["x"]}))
        await agent.collect(1)
        await agent.close()
        await agent.close()
        with pytest.raises(DataflowError, match=r"after close\(\)"):
            agent.submit(2, samples(1))

    run(body)
    with pytest.raises(DataflowError, match="on a running event loop"):
        RewardAgent(quick).submit(1, samples(1))
    with pytest.raises(ConfigError, match="concurrency=0"):
        RewardAgent(quick, limits=Limits(0))
    with pytest.raises(ConfigError, match="give a function or an object with compute_score"):
        RewardAgent("judge")
    with pytest.raises(ConfigError, match="give a function or an object with compute_score"):
        RewardAgent(Gates)


def test_whoever_gives_up_waiting_leaves_the_groups() -> None:
    async def body() -> None:
        gates = Gates()
        agent = RewardAgent(gates)
        agent.submit(1, samples(2, n=1))
        impatient = await soon(agent.collect(1, 2))
        with pytest.raises(DataflowError, match="all groups of step 1 are being collected already"):
            await agent.collect(1)
        impatient.cancel()
        with pytest.raises(asyncio.CancelledError):
            await impatient
        # Served, but cancelled in the same turn of the loop, before it could look.
        unlucky = await soon(agent.collect(1, 1))
        await gates.let("1.0")
        while agent.steps.live[1].waiters:
            await asyncio.sleep(0)
        unlucky.cancel()
        await asyncio.wait([unlucky])
        assert unlucky.cancelled()
        await gates.let("0.0")
        assert (await agent.collect(1)).ids == (0, 1)
        await agent.close()

    run(body)


@pytest.mark.parametrize("closing", [False, True])
def test_cancel_and_close_wake_the_waiters(closing: bool) -> None:
    async def body() -> None:
        gates = Gates()
        agent = RewardAgent(gates, limits=Limits(2))
        agent.submit(1, samples(3, n=1))
        waiting = await soon(agent.collect(1))
        await gates.running("0.0", "1.0")
        if closing:
            await agent.close()
        else:
            assert agent.cancel(1) == 3
            assert agent.cancel(1) == 0
        with pytest.raises(RewardFailed, match="closed" if closing else "step 1: its reward requests were cancelled"):
            await waiting
        assert gates.now == 0 or not closing
        assert agent.stats()["cancelled"] == 3
        await agent.close()

    run(body)


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
        run(body)
    finally:
        gc.enable()


def test_extra_columns() -> None:
    async def body() -> None:
        def score(solution_str: str, **_: Any) -> Any:
            returns = {
                "0.0": (1, "how?", "so"),
                "0.1": {"score": True, "tokens": [1, 2], "query": None},
                "1.0": np.float32(0.5),
            }
            return returns.get(solution_str, 2)

        agent = RewardAgent(score)
        agent.submit(1, samples(2))
        rewards = await agent.collect(1)
        assert rewards["score"].tolist() == [1, 1, 0.5, 2]
        assert rewards["query"].tolist() == ["how?", None, None, None]
        assert rewards["explanation"].tolist() == ["so", None, None, None]
        assert rewards["tokens"].tolist() == [None, [1, 2], None, None]
        await agent.close()

    run(body)
