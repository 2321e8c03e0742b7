"""A place of a server on another node: an actor there starts the server, and the next one on a node that is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dataflow.cluster.answer import answering, cause, died, last_words
from dataflow.cluster.nodes import log_nodes, nodes_of
from dataflow.cluster.paths import SeesPaths, Where
from dataflow.cluster.shared_paths import check_version
from dataflow.errors import DataflowError, RunError, UserError
from dataflow.rewards.models.placed.relay import Relay
from dataflow.rewards.models.server import CLOSE_S, ModelServer
from dataflow.rewards.models.site import ServerPlan
from dataflow.system.children import restore_path
from dataflow.system.secrets import redact_logs

_CONTACT_S = 2.0
"""Seconds for a message to an actor and back."""


class End(NamedTuple):
    """How a server has ended: whether it was killed, and why it ended."""

    killed: bool
    reason: str


class ServerHost(SeesPaths):
    """The actor beside a server, whose process ends with it."""

    _server: ModelServer | None = None

    def __init__(self) -> None:
        restore_path()
        redact_logs()
        self._answered = threading.Event()

    @answering
    def start(self, plan: ServerPlan, log: str, start_s: float, hang_s: float) -> tuple[int, int]:
        """Starts the server; returns its port and its process group."""
        with contextlib.suppress(OSError):  # a node may lack it
            os.chdir(plan.directory)
        if plan.device == "cpu":  # Ray has set a number of its own
            os.environ["OMP_NUM_THREADS"] = str(plan.threads)
        self._site = site = plan.site(self.where().address)
        self._server = server = site.start(Path(log), start_s, self._answered.set, hang_s)
        self._waiting = threading.Thread(target=self._wait, daemon=True)
        self._waiting.start()
        return site.port, server.pid

    def _wait(self) -> None:
        assert self._server is not None
        self._server.wait()
        self._answered.set()

    def answered(self) -> bool:
        """Waits until the server answers, or has ended; returns whether it answered."""
        self._answered.wait()
        assert self._server is not None
        return self._server.ready

    def end(self) -> End:
        """Waits until the server has ended."""
        self._waiting.join()
        assert self._server is not None
        return End(self._server.killed, self._server.reason())

    def close(self) -> None:
        """Ends the server."""
        if self._server is not None:
            self._server.close()


class PlacedSite:
    """The place of a server on a node of the cluster, behind a relay on this machine; a lost node gives way to another.

    Args:
        what: the server in messages.
        plan: what it runs.
        options: of the actor, for Ray.
        address: where the relay listens.
        check: compares what an actor's node sees with what this machine does; raises ConfigError.
        lacking: says what the nodes of the cluster lack for it, as a clause; "" if nothing is known.
        place_s: seconds that it may wait for a node.

    Attributes:
        url: of the relay.
        place_s: as given; counts for the next server.
    """

    def __init__(
        self,
        what: str,
        plan: ServerPlan,
        options: Mapping[str, Any],
        address: str,
        check: Callable[[Any, Where], Coroutine[Any, Any, None]],
        lacking: Callable[[], str],
        place_s: float,
    ) -> None:
        self.what, self.plan = what, plan
        self._options, self._check, self._lacking, self.place_s = dict(options), check, lacking, place_s
        self.relay = Relay(address)
        self.url = self.relay.url
        self._first: Any = None

    def place(self) -> None:
        """Asks Ray for a node, for the first server."""
        self._first = self._actor()

    def settle(self) -> None:
        """Waits for the node of the first server, and checks it.

        Raises:
            ConfigError: it does not see a path, or has another version of this package.
            RunError: there is none in time, or no process begins there.
        """
        import ray

        try:
            self.settled(self._first)
        except ray.exceptions.RayError as error:
            raise RunError(f"{self.what} could not be placed: {cause(error)}") from error

    def settled(self, actor: Any) -> Where:
        """Waits for the node of an actor, checks it, and returns it; raises as :meth:`settle` does, or Ray's errors."""
        import ray

        try:
            where: Where = ray.get(actor.where.remote(), timeout=self.place_s)
        except ray.exceptions.GetTimeoutError:
            clause = self._lacking() or "no node had room for it; see 'ray status'"
            raise RunError(f"{self.what} was not placed after {self.place_s:g} s; {clause}.") from None
        check_version(self.what, where)
        asyncio.run(self._check(actor, where))
        log_nodes(self.what, [where.node])
        return where

    def _actor(self) -> Any:
        import ray

        return ray.remote(ServerHost).options(max_concurrency=8, **self._options).remote()

    def start(self, log: Path, start_s: float, on_ready: Callable[[], None], hang_s: float) -> PlacedServer:
        """See :class:`~dataflow.rewards.models.site.Site`."""
        actor, self._first = self._first or self._actor(), None
        return PlacedServer(self, actor, (self.plan, str(log.absolute()), start_s, hang_s), on_ready)

    def close(self) -> None:
        """See :class:`~dataflow.rewards.models.site.Site`."""
        import ray

        self.relay.close()
        if self._first is not None and ray.is_initialized():
            ray.kill(self._first)
        self._first = None


class PlacedServer:
    """A server that an actor has started; the other end of :class:`ServerHost`.

    Args:
        site: its place.
        actor: that starts it.
        order: arguments of :meth:`ServerHost.start`.
        on_ready: called by :meth:`wait` when it answers.

    Attributes:
        pid: of its process group, on its node; 0 before it was started.
    """

    def __init__(self, site: PlacedSite, actor: Any, order: Sequence[Any], on_ready: Callable[[], None]) -> None:
        self.pid = 0
        self._site, self._actor, self._order, self._on_ready = site, actor, order, on_ready
        self._where: Where | None = None
        self._end = End(False, "it was not started")
        self._unplaced: RunError | None = None

    def wait(self) -> None:
        """Waits until it answers, then until it has ended, or its node is gone."""
        import ray

        relay = self._site.relay
        try:
            where = self._where = self._site.settled(self._actor)
            port, self.pid = ray.get(self._actor.start.remote(*self._order))
            relay.lead_to((where.address, port))
            # Repeated while the connection to its node is broken, until Ray knows whether the node is gone.
            if ray.get(self._actor.answered.options(max_task_retries=-1).remote()):
                self._on_ready()
            self._end = ray.get(self._actor.end.options(max_task_retries=-1).remote())
        except RunError as error:
            self._unplaced = error
        except Exception as error:
            reason = cause(error)
            if isinstance(reason, UserError):  # another start there would have the same end
                self._unplaced = RunError(f"{self._site.what} could not be placed: {reason}")
                self._unplaced.__cause__ = reason
            else:
                self._end = self._failed(error)
        finally:
            relay.lead_to(None)

    def _failed(self, error: Exception) -> End:
        """Returns how it ended, from the error of a call to its actor."""
        import ray

        if not died(error):
            reason = cause(error)
            return End(False, str(reason) if isinstance(reason, DataflowError) else last_words(reason))
        where = self._where
        with contextlib.suppress(Exception):  # Ray may not know its nodes just now
            if where is not None and where.node not in {node.id for node in nodes_of(ray.nodes())}:
                return End(True, f"node {where.address}, where it ran, is gone")
        return End(True, f"the process beside it died: {last_words(error)}")

    @property
    def killed(self) -> bool:
        """See :class:`~dataflow.rewards.models.site.ServerProcess`."""
        return self._end.killed

    def reason(self) -> str:
        """See :class:`~dataflow.rewards.models.site.ServerProcess`."""
        if self._unplaced is not None:
            raise self._unplaced
        return self._end.reason.rstrip(".")

    def close(self) -> None:
        """Ends it with its actor; may be called twice."""
        import ray

        if not ray.is_initialized():
            return
        if self.pid:
            with contextlib.suppress(Exception):  # the node may be gone
                ray.get(self._actor.close.remote(), timeout=CLOSE_S + _CONTACT_S)
        ray.kill(self._actor)
