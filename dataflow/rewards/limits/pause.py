"""Pause: a time in which a queue starts nothing, as the service asked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dataflow.system import clock


class Pause:
    """A time in which a queue starts nothing.

    Args:
        on_end: called at its end.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None
        self.until = 0.0
        """Its end in seconds of ``clock.now()``; 0 before the first one."""

    @property
    def active(self) -> bool:
        return self._timer is not None

    def extend(self, seconds: float) -> None:
        """Pauses for some seconds from now on, unless it lasts longer already."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if self._timer is not None:
            if self._timer.when() >= until:
                return
            self._timer.cancel()
        self._timer = loop.call_at(until, self._end)
        self.until = clock.now() + seconds

    def _end(self) -> None:
        self._timer = None
        self._on_end()

    def cancel(self) -> None:
        """Ends it without calling ``on_end``."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
