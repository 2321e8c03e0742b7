"""What SIGHUP, SIGINT and SIGTERM do to a command: the first one ends it, and further ones change nothing.

Python's own handlers differ by signal and by moment: SIGTERM ends the interpreter without any cleaning up, and a
second Ctrl-C interrupts the cleaning up of the first.
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
"""Seconds that a run may take to end after its supervisor was killed."""


class Stopping:
    """The handlers of the signals that end a command; a context manager that may be entered again.

    Outside of :meth:`deferred` the first signal raises KeyboardInterrupt. A signal that is ignored when the handlers
    are installed (SIGHUP under nohup) stays so.

    Attributes:
        received: the first signal, None before it.
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
            self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()

    def install(self) -> None:
        """Installs the handlers; does nothing outside of the main thread."""
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler == signal.SIG_IGN:
                continue
            with contextlib.suppress(ValueError):  # only the main thread may install handlers
                # Also if it is Python's own handler already: a library in C++ replaces it behind Python's back.
                signal.signal(number, self._handle)
                if handler != self._handle:
                    self._before.setdefault(number, handler)

    def reinstall(self) -> None:
        """Installs the handlers again, if they were installed and a library has replaced them."""
        if self._depth:
            self.install()

    def supervised_by(self, pid: int) -> None:
        """Tells which parent process ends this one if it does not end by itself."""
        self._supervisor = pid

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Lets a signal be recorded, and raise nothing; :meth:`calls` says what else it does."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
            self._on_stop = None

    def calls(self, on_stop: Callable[[], None] | None) -> None:
        """Sets what the first signal calls, from the main thread; calls it at once if the signal has come."""
        self._on_stop = on_stop
        if self.received is not None and on_stop is not None:
            on_stop()

    @property
    def exit_code(self) -> int:
        """What a shell reports of a command that the signal ended; of SIGINT if there was none."""
        return 128 + (self.received or signal.SIGINT)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        if self._supervisor and os.getppid() != self._supervisor:
            # Nothing else ends a run that hangs: the kernel does, whatever Python is busy with.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(ORPHAN_S)
        if self._on_stop is not None:
            self._on_stop()
        elif not self._deferred:
            raise KeyboardInterrupt


stopping = Stopping()
"""Of this process: signals belong to the process, and so do their handlers."""
