"""The run's own judge server, restarted when it dies, behind a socket that stays open."""

from __future__ import annotations

from collections.abc import Callable

from loguru import logger

from dataflow.errors import RunError
from dataflow.rewards.judge.server import BACKLOG, JudgeProcess, start_judge
from dataflow.system.address import host_port, listening
from dataflow.system.kept import KeptServer
from dataflow.system.loopback import ADDRESS

RESTARTS = 3
"""Restarts of the judge in one run; as many as of the engine and of the reward agent."""


class JudgeKeeper:
    """Starts a judge server and restarts it when it dies; a context manager.

    Each server inherits this process's listening socket: connections made during a restart wait for the new server.
    Requests in flight fail with a connection error, which is retried.

    Args:
        latency, time_scale, seed: see :func:`~dataflow.rewards.judge.server.start_judge`.
        on_lost: called from another thread when the judge cannot be restarted.
        address: where it listens.

    Attributes:
        url: of the server.
        deaths: of servers so far.
    """

    def __init__(
        self,
        latency: str,
        time_scale: float,
        seed: int,
        on_lost: Callable[[RunError], None],
        address: str = ADDRESS,
    ) -> None:
        self._arguments = (latency, time_scale, seed)
        self._listener = listening(address, backlog=BACKLOG)
        self.url = f"http://{host_port(address, self._listener.getsockname()[1])}"
        self.deaths = 0
        self._server = KeptServer("judge keeper", self._start, self._on_death, on_lost)

    @property
    def pid(self) -> int:
        """Process id of the current server."""
        return self._server.process.pid

    def __enter__(self) -> JudgeKeeper:
        try:
            self._server.open()
        except BaseException:
            self._listener.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()
        self._listener.close()

    def _start(self) -> JudgeProcess:
        return start_judge(*self._arguments, listener=self._listener.fileno())

    def _on_death(self, _process: JudgeProcess) -> None:
        self.deaths += 1
        if self.deaths > RESTARTS:
            raise RunError(
                f"the run's own judge died {self.deaths} times (killed, or out of memory); free memory, or "
                "set judge.url to a judge that runs elsewhere."
            )
        logger.warning(
            f"the run's own judge died (killed, or out of memory): restart {self.deaths} of {RESTARTS}; "
            "requests in flight are retried."
        )
