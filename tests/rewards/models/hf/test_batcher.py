"""Batches: what waits is computed together, in rows of similar length, and nothing that is waited for is lost."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

from dataflow.rewards.models.hf.batcher import Batcher, Closed

pytestmark = pytest.mark.timeout(30)


class Device:
    """Computes the sum of each row, and stops before each batch at a gate."""

    def __init__(self) -> None:
        self.batches: list[list[Sequence[int]]] = []
        self.gate = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)

    def __call__(self, rows: list[Sequence[int]]) -> list[int]:
        self.batches.append(rows)
        self.begun.release()
        assert self.gate.acquire(timeout=20)
        if any(-1 in row for row in rows):
            raise ValueError("a row that cannot be computed")
        return [sum(row) for row in rows]

    def open(self) -> None:
        for _ in range(1000):
            self.gate.release()

    async def computing(self) -> None:
        """Waits until the next batch has begun."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=20)


@pytest.fixture
def device() -> Iterator[Device]:
    made = Device()
    yield made
    made.open()


def run(device: Device, body: Callable[[Batcher[int]], Awaitable[Any]], rows: int = 64, tokens: int = 4096) -> Any:
    async def limited() -> Any:
        batcher: Batcher[int] = Batcher(device, rows, tokens)
        try:
            async with asyncio.timeout(20):
                return await body(batcher)
        finally:
            device.open()
            await batcher.close()

    return asyncio.run(limited())


def ask(batcher: Batcher[int], rows: Sequence[Sequence[int]]) -> list[asyncio.Task[int]]:
    return [asyncio.ensure_future(batcher.result(row)) for row in rows]


def test_what_arrives_while_a_batch_computes_is_the_next_batch(device: Device) -> None:
    async def body(batcher: Batcher[int]) -> None:
        first = ask(batcher, [[1, 2]])
        await device.computing()
        others = ask(batcher, [[at] * 3 for at in range(10)])
        await asyncio.sleep(0)
        device.open()
        assert await asyncio.gather(*first, *others) == [3, *(3 * at for at in range(10))]
        assert list(map(len, device.batches)) == [1, 10]
        assert (batcher.batches, batcher.rows) == (2, 11)

    run(device, body)


def test_a_batch_has_rows_of_similar_length_and_the_oldest(device: Device) -> None:
    lengths = [500, 20, 480, 510, 25, 520, 2000]

    async def body(batcher: Batcher[int]) -> None:
        first = ask(batcher, [[0]])
        await device.computing()
        others = ask(batcher, [[1] * length for length in lengths])
        await asyncio.sleep(0)
        device.open()
        assert await asyncio.gather(*first, *others) == [0, *lengths]

    run(device, body, tokens=1600)
    sizes = [sorted(map(len, rows)) for rows in device.batches]
    assert sizes == [[1], [480, 500, 510], [20, 25], [520], [2000]]


def test_limits_of_rows_tokens_and_padding_hold_for_any_rows(device: Device) -> None:
    rng = random.Random(0)
    lengths = [rng.choice([1, 7, 90, 700, 1500]) + rng.randrange(40) for _ in range(300)]
    device.open()

    async def body(batcher: Batcher[int]) -> None:
        assert await asyncio.gather(*ask(batcher, [[1] * length for length in lengths])) == lengths

    run(device, body, rows=8, tokens=3000)
    for rows in device.batches:
        longest, padded = max(map(len, rows)), len(rows) * max(map(len, rows))
        assert len(rows) <= 8
        assert padded <= 3000 or len(rows) == 1
        assert padded <= 1024 or sum(map(len, rows)) >= 0.75 * padded or longest > 3000
    assert len(device.batches) < 100


def test_a_row_whose_caller_has_left_is_not_computed(device: Device) -> None:
    async def body(batcher: Batcher[int]) -> None:
        first = ask(batcher, [[1]])
        await device.computing()
        left, stays = ask(batcher, [[2], [3]])
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        device.open()
        assert await asyncio.gather(*first, stays) == [1, 3]
        assert device.batches == [[[1]], [[3]]]

    run(device, body)


def test_a_batch_that_fails_fails_its_rows_and_no_other(device: Device) -> None:
    async def body(batcher: Batcher[int]) -> None:
        bad = ask(batcher, [[-1]])
        await device.computing()
        good = ask(batcher, [[4]])
        device.open()
        with pytest.raises(ValueError, match="cannot be computed"):
            await bad[0]
        assert await good[0] == 4

    run(device, body)


def test_rows_wait_while_it_is_paused(device: Device) -> None:
    done: list[str] = []

    async def body(batcher: Batcher[int]) -> None:
        first = ask(batcher, [[1]])
        await device.computing()
        pausing = asyncio.ensure_future(batcher.pause(lambda: done.append("paused")))
        late = ask(batcher, [[2]])
        await asyncio.sleep(0)
        assert done == []  # the batch computes
        device.open()
        await pausing
        assert await first[0] == 1
        assert batcher.paused
        await batcher.pause(lambda: done.append("twice"))

        def fail() -> None:
            raise OSError("gone")

        with pytest.raises(OSError, match="gone"):
            await batcher.resume(fail)
        assert batcher.paused
        assert not late[0].done()
        await batcher.resume(lambda: done.append("resumed"))
        assert await late[0] == 2
        assert done == ["paused", "resumed"]

    run(device, body)


def test_closing_fails_what_has_no_result_without_waiting_for_the_batch(device: Device) -> None:
    async def body(batcher: Batcher[int]) -> None:
        rows = ask(batcher, [[1]])
        await device.computing()
        rows += ask(batcher, [[2]])
        await asyncio.sleep(0)
        await batcher.close()
        for row in rows:
            with pytest.raises(Closed):
                await row
        with pytest.raises(Closed):
            await batcher.result([3])

    run(device, body)
