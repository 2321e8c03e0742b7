"""The servers of one reward model, each restarted at its address when it dies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from functools import partial
from pathlib import Path

from loguru import logger

from dataflow.errors import RunError
from dataflow.rewards.models.gpus import VISIBLE
from dataflow.rewards.models.server import ModelServer, Port
from dataflow.system.health import HANG_S
from dataflow.system.kept import KeptServer
from dataflow.system.loopback import ADDRESS

_LOOK_S = 5.0
"""Seconds after which a wait for another process to remove a file looks for itself; the file's end wakes it."""


class ModelServers:
    """Starts the equal servers of one reward model and restarts those that die; a context manager.

    Its begin does not wait for them: ``ready`` does. A request at a server that is being restarted fails at once with a
    refused connection.

    Args:
        name: of the model.
        command: returns the command line of a server at a port.
        replicas: number of servers.
        logs: directory of their logs, ``NAME-0.log`` and so on.
        environment: all variables of a server.
        gpus: CUDA_VISIBLE_DEVICES of each server; empty on a CPU.
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
        command: Callable[[int], Sequence[str]],
        replicas: int,
        *,
        logs: Path,
        environment: Mapping[str, str],
        gpus: Sequence[str] = (),
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
        self._logs = [logs / f"{name}-{number}.log" for number in range(replicas)]
        self._ports: list[Port] = []
        self._servers: list[KeptServer[ModelServer]] = []
        with contextlib.ExitStack() as stack:
            for number, log in enumerate(self._logs):
                port = Port()
                stack.callback(port.close)
                self._ports.append(port)
                start = partial(
                    ModelServer,
                    command(port.number),
                    port.number,
                    log,
                    {**environment, VISIBLE: gpus[number]} if gpus else environment,
                    start_s,
                    partial(self._on_ready, number),
                    hang_s,
                )
                on_death = partial(self._on_death, number)
                lose = partial(self._lose, number)
                self._servers.append(KeptServer(f"keeper of {log.stem}", start, on_death, lose))
            stack.pop_all()
        self.urls = [f"http://{ADDRESS}:{port.number}" for port in self._ports]

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

    def _close(self, servers: Sequence[KeptServer[ModelServer]]) -> None:
        self._closing.set()
        # Side by side, as each may take seconds.
        threads = [threading.Thread(target=server.close) for server in servers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for port in self._ports:
            port.close()

    def _on_ready(self, number: int) -> None:
        with self._lock:
            self._started.add(number)
            all_there = len(self._started) == len(self._servers)
        if all_there:
            with contextlib.suppress(InvalidStateError):  # after a restart it was ready before
                self.ready.set_result(None)

    def _on_death(self, number: int, server: ModelServer) -> None:
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
