"""An event loop whose clock jumps: what would take minutes of waiting takes no time, and a hang is an error at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

TICK_S = 1e-6
"""Time that the clock advances per reading, as code that reads it twice may rely on some progress."""

THREAD_S = 5.0
"""Real seconds that a thread, such as the ledger's writer, may take while nothing else is left to wait for."""


class Hang(Exception):
    """Everybody waits, and nothing is left that could wake anyone."""


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if timeout is None and not ready and not (ready := super().select(THREAD_S)):
            raise Hang("nothing runs, and no timer is set")
        if not ready:
            self.now += max(timeout or 0.0, TICK_S)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time begins at 0 and jumps to the next timer whenever nothing can run."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def timers(self) -> list[float]:
        """Returns when the timers that are set go off, in order."""
        return sorted(timer.when() for timer in self._scheduled if not timer.cancelled())  # type: ignore[attr-defined]


def timers() -> list[float]:
    """Returns the timers of the running loop, which is virtual; see :meth:`VirtualLoop.timers`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop.timers()


def run_virtual(test: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """Runs a coroutine function on a new loop of that kind, and fails for every error that was not retrieved.

    Raises:
        Hang: it waits for what will never be.
    """
    unseen: list[Any] = []
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.get_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
        result = runner.run(test())
    assert not unseen, unseen
    return result
