"""Batcher: computes rows that are waiting together; while one batch computes, the next one fills."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from dataflow.errors import DataflowError

Row = Sequence[int]
Result = TypeVar("Result")

_SMALL = 1024
"""Tokens of a padded batch below which a batch of its own would cost more than the padding."""
_PADDING = 0.25
"""Largest share of padding in a larger batch."""


class Closed(DataflowError):
    """The batcher was closed before the row was computed."""


@dataclass(eq=False)
class _Waiting(Generic[Result]):
    row: Row
    result: asyncio.Future[Result]


class Batcher(Generic[Result]):
    """Computes rows in batches, in a thread of its own.

    A batch begins when the previous one ends, without a timer: a lone row does not wait for others. It contains the row
    that has waited longest, and of the others those closest to it in length.

    Args:
        compute: returns the results of rows, in their order; called from the thread.
        max_rows: of a batch.
        max_tokens: of a batch, padding included; a longer row is computed alone.

    Attributes:
        batches: number of batches so far.
        rows: number of rows in them.
    """

    def __init__(self, compute: Callable[[list[Row]], list[Result]], max_rows: int, max_tokens: int) -> None:
        self._compute = compute
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self._waiting: list[_Waiting[Result]] = []
        self._thread = ThreadPoolExecutor(1, "batcher")
        self._wake = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        # Held by a batch, and by what must not run beside one.
        self._device = asyncio.Lock()
        self._working: asyncio.Task[None] | None = None
        self._closed = False
        self.batches = self.rows = 0

    @property
    def paused(self) -> bool:
        """Whether rows wait for :meth:`resume`."""
        return not self._open.is_set()

    async def result(self, row: Row) -> Result:
        """Returns the result of a row; a row whose caller is cancelled leaves the queue.

        Raises:
            Closed: see there.
            Exception: what ``compute`` raised for the batch.
        """
        if self._closed:
            raise Closed("the server is ending; send the request to another.")
        if self._working is None:
            self._working = asyncio.get_running_loop().create_task(self._work())
        waiting = _Waiting[Result](row, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._wake.set()
        return await waiting.result

    async def pause(self, then: Callable[[], None]) -> None:
        """Lets the batch that computes end, and calls a function in the thread; rows then wait for :meth:`resume`."""
        async with self._device:
            if not self.paused:
                self._open.clear()
                await self._in_thread(then)

    async def resume(self, first: Callable[[], None]) -> None:
        """Calls a function in the thread, then computes the rows that wait; they keep waiting if it raises."""
        async with self._device:
            if self.paused:
                await self._in_thread(first)
                self._open.set()

    async def close(self) -> None:
        """Fails all rows that have no result; does not wait for the batch that computes, which may take minutes."""
        self._closed = True
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        _fail(self._waiting, Closed("the server ended before it computed the request."))
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, function: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def _work(self) -> None:
        while True:
            await self._wake.wait()
            await self._open.wait()
            async with self._device:
                if self.paused:
                    continue
                batch = self._next()
                if batch:
                    await self._run(batch)

    async def _run(self, batch: list[_Waiting[Result]]) -> None:
        self.batches += 1
        self.rows += len(batch)
        rows = [waiting.row for waiting in batch]
        try:
            results = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, rows)
        except asyncio.CancelledError:
            self._waiting += batch  # which close() fails
            raise
        except Exception as error:
            _fail(batch, error)
            return
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.result.done():  # its caller may have left
                waiting.result.set_result(result)

    def _next(self) -> list[_Waiting[Result]]:
        """Takes the rows of the next batch out of the queue; none if nothing waits."""
        self._waiting = [waiting for waiting in self._waiting if not waiting.result.done()]
        if not self._waiting:
            self._wake.clear()
            return []
        first = len(self._waiting[0].row)
        nearest = sorted(self._waiting, key=lambda waiting: abs(len(waiting.row) - first))
        batch, longest, tokens = [nearest[0]], first, first
        for waiting in nearest[1 : self._max_rows]:
            longest, tokens = max(longest, len(waiting.row)), tokens + len(waiting.row)
            padded = longest * (len(batch) + 1)
            if padded > self._max_tokens or (padded > _SMALL and tokens < (1 - _PADDING) * padded):
                break
            batch.append(waiting)
        taken = set(map(id, batch))
        self._waiting = [waiting for waiting in self._waiting if id(waiting) not in taken]
        return batch


def _fail(some: Sequence[_Waiting[Any]], error: Exception) -> None:
    for waiting in some:
        if not waiting.result.done():
            waiting.result.set_exception(error)
