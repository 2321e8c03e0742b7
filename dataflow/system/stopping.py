"""Handlers of SIGHUP, SIGINT and SIGTERM: the first signal ends a command, further ones have no effect.

Python's default handlers differ: SIGTERM ends the interpreter without clean-up, and a second Ctrl-C interrupts the
clean-up of the first.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
ORPHAN_S = 4
"""Seconds that a run may take to end after its supervisor is killed."""


class Stopping:
    """Installs the signal handlers; a reentrant context manager, whose ``received`` is the first signal.

    Outside of :meth:`deferred` the first signal raises KeyboardInterrupt. A signal that is ignored when the handlers
    are installed (SIGHUP under nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._depth = 0
        self._deferred = False
        self._on_stop: Callable[[], None] | None = None
        self._supervisor = 0

    def __enter__(self) -> Stopping:
        self._depth += 1
        if self._depth == 1:
            self.received = None
            for number in SIGNALS:
                if (handler := signal.getsignal(number)) != signal.SIG_IGN:
                    with contextlib.suppress(ValueError):  # only the main thread may install handlers
                        signal.signal(number, self._handle)
                        self._before[number] = handler
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()

    def supervised_by(self, pid: int) -> None:
        """Sets the parent process that ends this one if it does not end by itself."""
        self._supervisor = pid

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within the block a signal does not raise: it is recorded and calls what :meth:`calls` sets."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            self._on_stop = None

    def calls(self, on_stop: Callable[[], None] | None) -> None:
        """Sets a function that the first signal calls in the main thread; calls it now if there was a signal."""
        self._on_stop = on_stop
        if self.received is not None and on_stop is not None:
            on_stop()

    @property
    def exit_code(self) -> int:
        """The exit code of a shell for a command that the signal ended; that of SIGINT if there was none."""
        return 128 + (self.received or signal.SIGINT)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        if self._supervisor and os.getppid() != self._supervisor:
            # The supervisor is gone: let the kernel end this process if it hangs.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(ORPHAN_S)
        if self._on_stop is not None:
            self._on_stop()
        elif not self._deferred:
            raise KeyboardInterrupt


stopping = Stopping()
"""The handlers of this process."""
