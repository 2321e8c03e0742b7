"""A server process that is started again when it dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from dataflow.errors import RunError


class Process(Protocol):
    """A process that serves."""

    @property
    def pid(self) -> int:
        """Its id."""

    def wait(self) -> object:
        """Waits until it has ended."""

    def close(self) -> None:
        """Ends it and waits for it; may be called twice, and by another thread than that of :meth:`wait`."""


Kept = TypeVar("Kept", bound=Process)


class KeptServer(Generic[Kept]):
    """A server process that a thread starts again when it dies.

    Args:
        name: of the thread.
        start: starts a process.
        on_death: called with a process that has died; raises RunError if there shall be no other.
        on_lost: called from the thread with the error when there is no other.

    Attributes:
        process: the current one.
    """

    process: Kept

    def __init__(
        self,
        name: str,
        start: Callable[[], Kept],
        on_death: Callable[[Kept], None],
        on_lost: Callable[[RunError], None],
    ) -> None:
        self._start, self._on_death, self._on_lost = start, on_death, on_lost
        self._closed = False
        self._lock = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, name=name, daemon=True)

    def open(self) -> None:
        """Starts the first process. If that fails, or the thread cannot start, no process is left."""
        self.process = self._start()
        try:
            self._watcher.start()
        except BaseException:
            self.process.close()
            raise

    def close(self) -> None:
        """Ends the process and the thread."""
        with self._lock:
            self._closed = True
        self.process.close()
        self._watcher.join()

    def _watch(self) -> None:
        try:
            while True:
                self.process.wait()
                # Held during a restart, so that close() ends the new process, not the dead one.
                with self._lock:
                    if self._closed:
                        return
                    self.process.close()
                    self._on_death(self.process)
                    self.process = self._start()
        except RunError as error:
            lost = error
        except Exception as error:  # a full disk, too many files: the thread ends, so nothing restarts it
            why = f"{self._watcher.name}: the server cannot be restarted ({type(error).__name__}: {error})"
            lost = RunError(f"{why}; mend that, and resume the run.")
        with self._lock:
            if self._closed:
                return
        self._on_lost(lost)
