"""The servers of one reward model, each restarted at its address when it dies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from pathlib import Path

from loguru import logger

from dataflow.errors import RunError
from dataflow.rewards.models.site import ServerProcess, Site
from dataflow.system.health import HANG_S
from dataflow.system.kept import KeptServer

_LOOK_S = 5.0
"""Seconds after which a wait for another process to remove a file looks for itself; the file's end wakes it."""


class ModelServers:
    """Starts the equal servers of one reward model and restarts those that die; a context manager.

    Its begin does not wait for them: ``ready`` does. A request at a server that is being restarted fails at once with a
    refused connection.

    Args:
        name: of the model.
        sites: where the servers run, one each; closed with this object.
        logs: directory of their logs, ``NAME-0.log`` and so on.
        start_s: seconds that a server may take to answer.
        hang_s: seconds without an answer to a health check after which a server is restarted.
        restarts: of all servers together.
        on_lost: called from another thread when a server cannot be started, or when none is left.
        flag: file that is there while they sleep; one that dies then is started when the file is gone.

    Attributes:
        urls: of the servers; they do not change.
        restarted: restarts so far.
        ready: done when each server has answered; its exception is that of a start that failed.
    """

    def __init__(
        self,
        name: str,
        sites: Sequence[Site],
        *,
        logs: Path,
        start_s: float,
        hang_s: float = HANG_S,
        restarts: int,
        on_lost: Callable[[RunError], None],
        flag: Path | None = None,
    ) -> None:
        self.name = name
        self.restarted = 0
        self.ready: Future[None] = Future()
        self._most = restarts
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._flag = flag
        if flag is not None:
            flag.unlink(missing_ok=True)  # of an earlier process of the run
        self._started: set[int] = set()
        self._lost: set[int] = set()
        self._sites = tuple(sites)
        self._logs = [logs / f"{name}-{number}.log" for number in range(len(sites))]
        self._servers = [
            KeptServer(
                f"keeper of {log.stem}",
                partial(site.start, log, start_s, partial(self._on_ready, number), hang_s),
                partial(self._on_death, number),
                partial(self._lose, number),
            )
            for number, (site, log) in enumerate(zip(self._sites, self._logs, strict=True))
        ]
        self.urls = [site.url for site in self._sites]

    @property
    def pids(self) -> list[int]:
        """Ids of the process groups of the servers."""
        return [server.process.pid for server in self._servers]

    @property
    def words(self) -> str:
        """How many servers have answered."""
        return f"reward model '{self.name}': {len(self._started)} of {len(self._servers)} servers answer"

    def __enter__(self) -> ModelServers:
        opened = []
        try:
            for server in self._servers:
                server.open()
                opened.append(server)
        except BaseException:
            self._close(opened)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close(self._servers)

    def _close(self, servers: Sequence[KeptServer[ServerProcess]]) -> None:
        self._closing.set()
        # Side by side, as each may take seconds.
        threads = []
        for server in servers:
            thread = threading.Thread(target=server.close)
            try:
                thread.start()
            except RuntimeError:  # the system has no room for another thread
                server.close()
            else:
                threads.append(thread)
        for thread in threads:
            thread.join()
        for site in self._sites:
            site.close()

    def _on_ready(self, number: int) -> None:
        with self._lock:
            self._started.add(number)
            all_there = len(self._started) == len(self._servers)
        if all_there:
            with contextlib.suppress(InvalidStateError):  # after a restart it was ready before
                self.ready.set_result(None)

    def _on_death(self, number: int, server: ServerProcess) -> None:
        what, reason = f"reward model '{self.name}'", server.reason()
        with self._lock:
            if number not in self._started and not server.killed:
                raise RunError(f"{what}: server {number} did not start ({reason}); see {self._logs[number]}.")
            if self.restarted >= self._most:
                raise RunError(
                    f"{what}: server {number} ended ({reason}), after {self.restarted} restarts "
                    f"(reward.models.{self.name}.restarts={self._most}); see {self._logs[number]}."
                )
            self.restarted += 1
        then = "it starts when its model wakes" if self._asleep() else "requests in flight there are sent again"
        logger.warning(f"{what}: server {number} ended ({reason}): restart {self.restarted} of {self._most}; {then}.")
        if self._flag is not None and self._asleep():  # others use the memory of its GPU
            from watchfiles import watch

            looks_ms = int(_LOOK_S * 1000)
            for _ in watch(
                self._flag.parent,
                stop_event=self._closing,
                rust_timeout=looks_ms,
                yield_on_timeout=True,
                recursive=False,
            ):
                if not self._asleep():
                    break

    def _asleep(self) -> bool:
        return self._flag is not None and self._flag.exists()

    def _lose(self, number: int, error: RunError) -> None:
        with self._lock:
            self._lost.add(number)
            left = len(self._servers) - len(self._lost)
        if left and self.ready.done():
            logger.warning(f"{str(error).rstrip('.')}; the run goes on with {left} of its servers.")
            return
        with contextlib.suppress(InvalidStateError):
            self.ready.set_exception(error)
        self._on_lost(error)
