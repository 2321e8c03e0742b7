"""Daemon threads for users' sync functions; they do not keep the process alive."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

OnIdle: TypeAlias = Callable[[], None]
"""Called in the thread after a job, when the thread can take the next one."""


class NoThread(RuntimeError):
    """The system cannot start another thread for a sync function."""

    fix = "lower reward.concurrency, make the function async, or raise the limit on threads (ulimit -u)"
    retry = True


class _Started(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return True


class _Thread(threading.Thread):
    """A thread whose ``start`` does not wait until it runs; for 1,024 calls these waits blocked the loop for 0.2 s.

    Python has no public way to skip the wait. If a future version renames ``_started``, the wait returns.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._started = _Started()

    def join(self, timeout: float | None = None) -> None:
        threading.Event.wait(self._started, timeout)
        super().join(timeout)


class Threads:
    """A pool of daemon threads. Those of ThreadPoolExecutor are joined at exit even if they are stuck."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], OnIdle] | None] = queue.SimpleQueue()
        self._idle: deque[None] = (
            deque()
        )  # an item per idle thread; cheaper than a semaphore, which is written in Python
        self._count = 0

    def run(self, job: Callable[[], OnIdle]) -> None:
        """Runs a job in an idle or new thread, and then the callback that the job returns.

        The thread counts as idle before the callback runs, so that consecutive calls use one thread.

        Raises:
            NoThread: no thread is idle and none can be started; the job is not run.
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
            on_idle = job()
            self._idle.append(None)
            on_idle()
            del job, on_idle  # an idle thread must not keep the last call's samples alive

    def close(self) -> None:
        """Ends each thread when it becomes idle."""
        for _ in range(self._count):
            self._jobs.put(None)
