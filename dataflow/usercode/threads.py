"""Threads in which sync functions of the user's run; they never keep the process."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

Tell: TypeAlias = Callable[[], None]


class NoThread(RuntimeError):
    """The system gives no further thread to call a sync function in."""

    fix = "lower reward.concurrency, make the function async, or raise the limit on threads (ulimit -u)"
    retry = True


class _Started(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return True


class _Thread(threading.Thread):
    """A thread whose start does not wait until it runs: with 1,024 calls in flight the loop waited 0.2 s in all.

    Python has no public way to leave the wait out. A Python that names its event otherwise waits again.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._started = _Started()

    def join(self, timeout: float | None = None) -> None:
        threading.Event.wait(self._started, timeout)
        super().join(timeout)


class Threads:
    """Daemon threads that are used again. ThreadPoolExecutor's are not: they are joined at exit, stuck or not."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Tell] | None] = queue.SimpleQueue()
        self._idle: deque[None] = deque()  # one for each idle thread; cheaper than a semaphore, whose lock is Python's
        self._count = 0

    def run(self, job: Callable[[], Tell]) -> None:
        """Runs the job in an idle thread, or in a new one, and then what it returns, which tells of its end.

        The thread is idle before the end is told: calls one after the other take one thread.

        Raises:
            NoThread: there is neither; the job will not run.
        """
        try:
            self._idle.pop()
        except IndexError:
            try:
                _Thread(target=self._work, name=f"reward-{self._count + 1}", daemon=True).start()
            except RuntimeError as error:
                raise NoThread(str(error)) from error
            self._count += 1
        self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            tell = job()
            self._idle.append(None)
            tell()
            del job, tell  # a waiting thread must not keep the last call's samples

    def close(self) -> None:
        """Ends the threads as they fall idle."""
        for _ in range(self._count):
            self._jobs.put(None)
