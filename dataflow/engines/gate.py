"""The gate of a rollout engine: samples are drawn beside each other, a weight sync, sleep or wake alone.

They begin in the order of their requests: a sync waits for the samples requested before it, or has them drawn again
after it; later samples wait for the sync. So nothing starves, and each sample is drawn with one version of the weights.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from dataflow.errors import Aborted, ServiceLost, UserError

T = TypeVar("T")


class Gate:
    """Lets the work of an engine begin.

    Work that raises a :class:`UserError` fails alone. Any other error loses the engine, since it may hold a part of its
    new weights, or its process is gone: all requests, later ones too, raise :class:`ServiceLost`.

    Args:
        lost: returns the message for such an error: the consequence and the fix; None if it loses nothing.

    Attributes:
        asleep: whether samples wait until work that runs alone sets it to False.
    """

    def __init__(self, lost: Callable[[Exception], str | None]) -> None:
        self.asleep = False
        self._message = lost
        self._ended: Callable[[], Exception] | None = None
        self._running: set[asyncio.Task[Any]] = set()  # those that request
        self._drawing: set[asyncio.Task[Any]] = set()  # of these, samples
        self._queue: deque[tuple[bool, asyncio.Future[None]]] = deque()  # whether it runs alone, and its turn
        self._inside = 0
        self._alone = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def draw(self, work: Callable[[], Awaitable[T]]) -> T:
        """Draws a sample: returns what ``work`` does. Cancelling the caller cancels the work.

        Raises:
            Aborted: the engine is closed.
            ServiceLost: the engine is lost.
        """
        here = asyncio.current_task()
        assert here is not None
        before = here.cancelling()
        while True:
            drawing = asyncio.ensure_future(self._run(work, alone=False))
            self._drawing.add(drawing)
            drawing.add_done_callback(self._drawing.discard)
            try:
                return await drawing
            except asyncio.CancelledError:
                if here.cancelling() > before:
                    raise  # else it is drawn again

    async def draw_all(self, works: Sequence[Callable[[], Awaitable[T]]]) -> AsyncGenerator[T, None]:
        """Draws samples and yields each when it has ended; closing the generator cancels the others."""
        tasks = [asyncio.ensure_future(self.draw(work)) for work in works]
        try:
            for coming in asyncio.as_completed(tasks):
                yield await coming
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def alone(self, work: Callable[[], Awaitable[None]], redraw: bool = False) -> None:
        """Runs ``work`` when nothing else is in flight; raises as :meth:`draw` does.

        Once begun, it is completed even if the caller is cancelled.

        Args:
            work: what to do.
            redraw: cancel the samples in flight and draw them again after the work, instead of waiting for them.
        """
        begun = False

        async def begin() -> None:
            nonlocal begun
            begun = True
            await work()

        task = asyncio.ensure_future(self._run(begin, alone=True))
        for drawing in tuple(self._drawing) if redraw else ():
            drawing.cancel()  # they come back behind this task, which is queued before they notice
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not begun:
                task.cancel()
            raise

    def close(self) -> None:
        """Ends all requests, later ones too, with :class:`Aborted`."""
        self._end(lambda: Aborted("rollout: the engine was closed."), None)

    def _end(self, error: Callable[[], Exception], here: asyncio.Task[Any] | None) -> Exception:
        """Ends all requests but that of this task with the error, or with that of an earlier end; returns it."""
        if self._ended is None:
            self._ended = error
            for task in self._running - {here}:
                task.cancel()  # at once, as an engine that closes may wait for a thread
        return self._ended()

    async def _run(self, work: Callable[[], Awaitable[T]], alone: bool) -> T:
        if self._ended is not None:
            raise self._ended()
        here = asyncio.current_task()
        assert here is not None
        before = here.cancelling()
        self._running.add(here)
        try:
            async with self._turn(alone):
                return await work()
        except UserError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if self._ended is not None and here.uncancel() <= before:  # else its caller is cancelled as well
                ended = self._ended()
                raise ended from ended.__cause__
            if not isinstance(error, Exception) or (message := self._message(error)) is None:
                raise
            raise self._end(_lost(message, error), here) from error
        finally:
            self._running.discard(here)

    @asynccontextmanager
    async def _turn(self, alone: bool) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((alone, turn))
        self._advance()
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._inside -= 1
                self._alone = False
            self._advance()

    def _advance(self) -> None:
        """Lets the first ones begin that may."""
        while not self._alone:
            while self._queue and self._queue[0][1].cancelled():
                self._queue.popleft()
            # Only what runs alone can wake the engine, so it overtakes the samples.
            waiting = (each for each in self._queue if (each[0] or not self.asleep) and not each[1].cancelled())
            first = next(waiting, None)
            if first is None or (first[0] and self._inside):
                return
            self._queue.remove(first)
            self._inside += 1
            self._alone = first[0]
            first[1].set_result(None)


def _lost(message: str, cause: Exception) -> Callable[[], Exception]:
    def error() -> Exception:
        found = ServiceLost(message)
        found.__cause__ = cause
        return found

    return error
