"""The run's own judge, built anew when it dies, behind a socket that outlives it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from loguru import logger

from dataflow.errors import RunError
from dataflow.rewards.judge.server import BACKLOG, JudgeProcess, start_judge

RESTARTS = 3
"""Deaths of one run's judge that it survives, as many as of its engine and of its reward agent."""


class JudgeKeeper:
    """Starts a judge server, and starts it again when it dies; a context manager.

    The listening socket is this process's, and each server inherits it: connections made meanwhile wait for the new
    one, and requests that were in flight fail with a connection error, which is retried.

    Args:
        latency, time_scale, seed: see :func:`~dataflow.rewards.judge.server.start_judge`.
        on_lost: called from another thread when the judge is not started again.

    Attributes:
        url: where it listens.
        deaths: of the server so far.
    """

    def __init__(self, latency: str, time_scale: float, seed: int, on_lost: Callable[[RunError], None]) -> None:
        self._arguments = (latency, time_scale, seed)
        self._on_lost = on_lost
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.deaths = 0
        self._closed = False
        self._lock = threading.Lock()
        self._process: JudgeProcess
        self._watcher = threading.Thread(target=self._watch, name="judge keeper", daemon=True)

    @property
    def pid(self) -> int:
        """Of the server that is up now."""
        return self._process.pid

    def __enter__(self) -> JudgeKeeper:
        try:
            self._start()
        except BaseException:
            self._listener.close()
            raise
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
        self._process.close()
        self._watcher.join()
        self._listener.close()

    def _start(self) -> None:
        self._process = start_judge(*self._arguments, listener=self._listener.fileno())

    def _watch(self) -> None:
        while True:
            self._process.wait()
            # Held while a new one starts: closing ends that one, not the dead one.
            with self._lock:
                if self._closed:
                    return
                self._process.close()
                self.deaths += 1
                try:
                    if self.deaths > RESTARTS:
                        raise RunError(
                            f"the run's own judge died {self.deaths} times (killed, or out of memory); free memory, or "
                            "let judge.url name a judge that runs elsewhere."
                        )
                    logger.warning(
                        f"the run's own judge died (killed, or out of memory): restart {self.deaths} of {RESTARTS}; "
                        "requests in flight are sent again."
                    )
                    self._start()
                except RunError as error:
                    self._on_lost(error)
                    return
