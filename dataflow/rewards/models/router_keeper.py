"""The run's HTTP router, restarted when it dies, behind a socket that stays open."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loguru import logger

from dataflow.errors import RunError
from dataflow.rewards.judge.server import BACKLOG, JudgeProcess
from dataflow.system.address import host_and_port, host_port, listening
from dataflow.system.children import command
from dataflow.system.health import HANG_S, answers, hangs
from dataflow.system.kept import KeptServer
from dataflow.system.loopback import ADDRESS

RESTARTS = 3
_START_S = 30.0


class _Router(JudgeProcess):
    """The process, which :meth:`wait` ends if it answers no more; ``hung`` says whether it did."""

    def __init__(self, arguments: Sequence[str], listener: int, hang_s: float) -> None:
        super().__init__(arguments, _START_S, (listener,), "the router of the reward models")
        self.hung, self._hang_s = False, hang_s

    def wait(self) -> None:
        address, port = host_and_port(urlsplit(self.url).netloc)
        self.hung = hangs(self.pid, partial(answers, port, self._hang_s, well=False, address=address), self._hang_s)
        if self.hung:
            self._process.kill()
        super().wait()


class RouterKeeper:
    """Starts the HTTP router of a run and restarts it when it dies; a context manager.

    Connections made during a restart wait for the new process. Requests in flight break, which clients retry.

    Args:
        models: options of a :class:`~dataflow.rewards.models.http_router.RoutedModel`, by name; others are ignored.
        on_lost: called from another thread when the router cannot be restarted.
        hang_s: seconds without an answer to GET /health after which the router is restarted.
        address: where it listens.

    Attributes:
        address: of the router, ``host:port``, as verl passes it to functions.
        url: the same with ``http://``.
        deaths: of its processes so far.
    """

    def __init__(
        self,
        models: Mapping[str, Mapping[str, Any]],
        on_lost: Callable[[RunError], None],
        hang_s: float = HANG_S,
        address: str = ADDRESS,
    ) -> None:
        self._models, self._hang_s = models, hang_s
        self._listener = listening(address, backlog=BACKLOG)
        self.address = host_port(address, self._listener.getsockname()[1])
        self.url = f"http://{self.address}"
        self.deaths = 0
        self._server = KeptServer("router keeper", self._start, self._on_death, on_lost)
        self._stack = contextlib.ExitStack()

    @property
    def pid(self) -> int:
        """Process id of the current router."""
        return self._server.process.pid

    def __enter__(self) -> RouterKeeper:
        with self._stack:
            self._stack.callback(self._listener.close)
            # Not on the command line, which others can read: an address may hold a password.
            directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="dataflow-router-"))
            self._file = Path(directory) / "models.json"
            self._file.write_text(json.dumps(self._models))
            self._server.open()
            self._stack.callback(self._server.close)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _start(self) -> _Router:
        listener = self._listener.fileno()
        options = ["--models", str(self._file), "--listener", str(listener)]
        arguments = command("dataflow.rewards.models.http_router", *options)
        return _Router(arguments, listener, self._hang_s)

    def _on_death(self, process: _Router) -> None:
        self.deaths += 1
        why = f"hung: no answer within {self._hang_s:g} s" if process.hung else "killed, or out of memory"
        what = f"the router of the reward models died ({why})"
        if self.deaths > RESTARTS:
            raise RunError(f"{what}, after {RESTARTS} restarts; free memory, and resume the run.")
        logger.warning(f"{what}: restart {self.deaths} of {RESTARTS}; requests in flight break, and are retried.")
