"""The gate of an engine: who begins when, and what a failure, a cancellation and a close do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.engines.gate import Gate
from dataflow.errors import Aborted, DataError, ServiceLost
from tests.engines.drawing import run

pytestmark = pytest.mark.timeout(60)


class Desk:
    """Samples that last until ``end`` is called, and syncs that last until then, too."""

    def __init__(self) -> None:
        self.gate = Gate(lambda cause: f"lost ({cause}); rebuild it.")
        self.version = 0
        self.drawing: list[tuple[str, asyncio.Future[None]]] = []
        self.begun: list[str] = []

    def sample(self, name: str) -> asyncio.Task[tuple[str, int]]:
        return asyncio.ensure_future(self.gate.draw(self.work(name)))

    def work(self, name: str) -> Callable[[], Awaitable[tuple[str, int]]]:
        async def draw() -> tuple[str, int]:
            version = self.version
            self.begun.append(name)
            mine = name, asyncio.get_running_loop().create_future()
            self.drawing.append(mine)
            try:
                await mine[1]
            finally:
                self.drawing.remove(mine)
            assert version == self.version, "a sync in mid-flight"
            return name, version

        return draw

    async def sync(self, redraw: bool = False, asleep: bool | None = None) -> None:
        async def work() -> None:
            assert not self.drawing
            await asyncio.sleep(0)
            self.version += 1
            self.begun.append(f"sync {self.version}")
            self.gate.asleep = self.gate.asleep if asleep is None else asleep

        await self.gate.alone(work, redraw)

    def end(self, count: int = 1, error: Exception | None = None) -> None:
        for _name, future in self.drawing[:count]:
            if future.done():
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


async def turn() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def test_a_sync_waits_for_the_samples_before_it_and_later_ones_wait_for_it() -> None:
    async def body() -> None:
        desk = Desk()
        samples = [desk.sample(name) for name in "ab"]
        await turn()
        syncs = [asyncio.ensure_future(desk.sync())]
        await turn()
        samples.append(desk.sample("c"))
        await turn()
        syncs.append(asyncio.ensure_future(desk.sync()))
        desk.end()
        await turn()
        assert desk.begun == ["a", "b"]
        desk.end()
        await turn()
        assert desk.begun == ["a", "b", "sync 1", "c"]
        desk.end()
        await asyncio.gather(*syncs)
        assert await asyncio.gather(*samples) == [("a", 0), ("b", 0), ("c", 1)]

    run(body())


def test_a_sync_may_have_the_samples_in_flight_drawn_again_before_later_ones() -> None:
    async def body() -> None:
        desk = Desk()
        samples = [desk.sample(name) for name in "abc"]
        await turn()
        desk.end()
        await turn()
        sync = asyncio.ensure_future(desk.sync(redraw=True))
        await turn()
        assert sync.done()
        samples.append(desk.sample("d"))
        await turn()
        assert desk.begun[:4] == ["a", "b", "c", "sync 1"]
        assert sorted(desk.begun[4:6]) == ["b", "c"]
        assert desk.begun[6:] == ["d"]
        desk.end(3)
        assert await asyncio.gather(*samples) == [("a", 0), ("b", 1), ("c", 1), ("d", 1)]

    run(body())


def test_samples_wait_while_the_engine_sleeps_but_a_sync_and_waking_do_not() -> None:
    async def body() -> None:
        desk = Desk()
        await desk.sync(asleep=True)
        sample = desk.sample("a")
        await turn()
        await desk.sync()
        assert desk.begun == ["sync 1", "sync 2"]
        await desk.sync(asleep=False)
        await turn()
        desk.end()
        assert await sample == ("a", 3)

    run(body())


def test_the_caller_of_a_sync_may_be_cancelled() -> None:
    """It is left out if it has not begun, and completed if it has."""

    async def body() -> None:
        desk = Desk()
        sample = desk.sample("a")
        await turn()
        given_up = asyncio.ensure_future(desk.sync())
        await turn()
        given_up.cancel()
        behind = desk.sample("b")
        await turn()
        assert desk.begun == ["a", "b"]
        desk.end(2)
        await asyncio.gather(sample, behind)
        begun = asyncio.ensure_future(desk.sync())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        begun.cancel()
        with pytest.raises(asyncio.CancelledError):
            await begun
        await turn()
        assert desk.begun[-1] == "sync 1"

    run(body())


def test_an_error_of_the_input_fails_one_sample_and_any_other_loses_the_engine() -> None:
    async def body() -> None:
        desk = Desk()
        samples = [desk.sample(name) for name in "abc"]
        await turn()
        desk.end(error=DataError("not this one"))
        with pytest.raises(DataError, match="not this one"):
            await samples[0]
        sync = asyncio.ensure_future(desk.sync())
        await turn()
        desk.end(error=ZeroDivisionError("no memory"))
        for waiter in (*samples[1:], sync):
            with pytest.raises(ServiceLost, match=r"^lost \(no memory\); rebuild it.$") as failure:
                await waiter
            assert isinstance(failure.value.__cause__, ZeroDivisionError)
        with pytest.raises(ServiceLost):
            await desk.sync()
        with pytest.raises(ServiceLost):
            await desk.sample("d")

    run(body())


def test_a_failed_sync_loses_the_engine_and_closing_ends_all() -> None:
    async def body() -> None:
        desk = Desk()

        async def broken() -> None:
            raise ValueError("half of them")

        for _ in range(2):
            with pytest.raises(ServiceLost, match="half of them"):
                await desk.gate.alone(broken)

        desk = Desk()
        waiters: list[Any] = [desk.sample("a")]
        await turn()
        waiters += [asyncio.ensure_future(desk.sync()), desk.sample("b")]
        await turn()
        desk.gate.close()
        for waiter in waiters:
            with pytest.raises(Aborted, match="was closed"):
                await waiter
        with pytest.raises(Aborted):
            await desk.sync()

    run(body())


@given(st.lists(st.sampled_from(["draw", "sync", "redraw", "sleep", "wake", "end", "cancel"]), max_size=30))
def test_each_sample_ends_once_whatever_happens(steps: list[str]) -> None:
    async def body() -> None:
        desk, samples, others = Desk(), [], []
        for number, step in enumerate(steps):
            if step == "draw":
                samples.append((str(number), desk.sample(str(number))))
            elif step == "end":
                desk.end()
            elif step == "cancel" and samples:
                samples[number % len(samples)][1].cancel()
            elif step in ("sync", "redraw", "sleep", "wake"):
                asleep = {"sleep": True, "wake": False}.get(step)
                others.append(asyncio.ensure_future(desk.sync(step == "redraw", asleep)))
            if number % 3:
                await turn()
        others.append(asyncio.ensure_future(desk.sync(asleep=False)))
        while not all(task.done() for task in (*others, *(task for _name, task in samples))):
            desk.end(len(desk.drawing))
            await turn()
        await asyncio.gather(*others)
        for name, task in samples:
            assert task.cancelled() or task.result()[0] == name
        assert desk.gate._inside == 0
        await desk.sync()

    run(body())
