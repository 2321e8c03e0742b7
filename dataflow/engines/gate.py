"""The gate of a rollout engine: samples are drawn beside each other, a weight sync, sleep or wake alone.

They begin in the order of their requests: a sync waits for the samples requested before it, later samples wait for the
sync. So nothing starves, and each sample is drawn with one version of the weights.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dataflow.errors import Aborted, ServiceLost, UserError

T = TypeVar("T")


@dataclass(eq=False)
class _Entry:
    """A request.

    Attributes:
        key: its place in the order of requests.
        alone: whether it runs alone.
        redraw: whether the samples in flight are cancelled for it, and drawn again.
        turn: done when it may begin.
        task: does it.
        behind: key of the work that it is drawn again behind.
    """

    key: tuple[int, int]
    alone: bool
    redraw: bool
    turn: asyncio.Future[None]
    task: asyncio.Task[Any] = field(init=False)
    behind: tuple[int, int] | None = None


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
        self._lost: Callable[[], Exception] | None = None
        self._numbers = itertools.count()
        self._waiting: list[_Entry] = []  # by key
        self._inside: dict[_Entry, None] = {}

    def draw(self, work: Callable[[], Awaitable[T]]) -> Coroutine[Any, Any, T]:
        """Requests a sample; returns a coroutine that returns what ``work`` does.

        Cancelling the coroutine cancels the work. A sync with ``redraw`` cancels it too, and calls it again afterwards.

        Raises:
            Aborted: the engine is closed.
            ServiceLost: the engine is lost.
        """
        return self._drawn(self._request(work, (next(self._numbers), 0)), work)

    async def draw_all(self, works: Sequence[Callable[[], Awaitable[T]]]) -> AsyncGenerator[T, None]:
        """Requests samples and yields each when it has ended; closing the generator cancels the others."""
        tasks = [asyncio.ensure_future(coming) for coming in [self.draw(work) for work in works]]
        try:
            for coming in asyncio.as_completed(tasks):
                yield await coming
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def alone(self, work: Callable[[], Awaitable[None]], redraw: bool = False) -> None:
        """Runs ``work`` when nothing else is in flight. Once begun, it is completed even if the caller is cancelled.

        Args:
            work: what to do.
            redraw: cancel the samples in flight and draw them again after the work, instead of waiting for them.

        Raises:
            Aborted: the engine is closed.
            ServiceLost: the engine is lost.
        """
        entry = self._request(work, (next(self._numbers), 0), alone=True, redraw=redraw)
        try:
            await asyncio.shield(entry.task)
        except asyncio.CancelledError:
            if self._lost is not None and not _cancelled():
                error = self._lost()
                raise error from error.__cause__
            if not entry.turn.done():
                entry.task.cancel()
            raise

    def close(self) -> None:
        """Ends all requests, later ones too, with :class:`Aborted`."""
        self._end(lambda: Aborted("rollout: the engine was closed."))

    async def closed(self) -> None:
        """Closes, and waits until all that was requested has ended."""
        tasks = [entry.task for entry in [*self._inside, *self._waiting]]
        self.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _fail(self, cause: Exception, message: str) -> Exception:
        def lost() -> Exception:
            error = ServiceLost(message)
            error.__cause__ = cause
            return error

        return self._end(lost)

    def _end(self, lost: Callable[[], Exception]) -> Exception:
        if self._lost is None:
            self._lost = lost
            for entry in [*self._inside, *self._waiting]:
                entry.task.cancel()
        return self._lost()

    def _request(
        self, work: Callable[[], Awaitable[Any]], key: tuple[int, int], alone: bool = False, redraw: bool = False
    ) -> _Entry:
        if self._lost is not None:
            raise self._lost()
        entry = _Entry(key, alone, redraw, asyncio.get_running_loop().create_future())

        async def begin() -> Any:
            await entry.turn
            try:
                return await work()
            except UserError:
                raise
            except Exception as error:
                if (message := self._message(error)) is None:
                    raise
                raise self._fail(error, message) from error

        entry.task = asyncio.ensure_future(begin())
        entry.task.add_done_callback(lambda _task: self._leave(entry))
        bisect.insort(self._waiting, entry, key=lambda each: each.key)
        self._advance()
        return entry

    async def _drawn(self, entry: _Entry, work: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                found: T = await entry.task
                return found
            except asyncio.CancelledError:
                if self._lost is not None and not _cancelled():
                    error = self._lost()
                    raise error from error.__cause__
                if entry.behind is None or _cancelled():
                    raise
            # After the work that it was cancelled for, and before all that was requested later.
            entry = self._request(work, (entry.behind[0], entry.key[1] or entry.key[0] + 1))

    def _leave(self, entry: _Entry) -> None:
        if entry in self._inside:
            del self._inside[entry]
        else:
            self._waiting.remove(entry)
        self._advance()

    def _advance(self) -> None:
        """Lets the first ones begin that may."""
        while self._waiting and not any(entry.alone for entry in itertools.islice(self._inside, 1)):
            first = self._waiting[0]
            if first.alone and self._inside:
                for entry in self._inside if first.redraw else ():
                    if entry.behind != first.key:
                        entry.behind = first.key
                        entry.task.cancel()
                return
            if self.asleep and not first.alone:
                # Only what runs alone can wake the engine, so it overtakes the samples.
                waking = next((entry for entry in self._waiting if entry.alone), None)
                if waking is None:
                    return
                first = waking
            self._waiting.remove(first)
            self._inside[first] = None
            if not first.turn.done():  # else its task is cancelled
                first.turn.set_result(None)


def _cancelled() -> bool:
    """Whether the caller itself is being cancelled."""
    here = asyncio.current_task()
    return here is not None and here.cancelling() > 0
