"""Router: which of several equal servers takes part, and what happens to the calls of one that does not answer.

The limiter chooses the server of a call when the call starts (:mod:`~dataflow.rewards.limits.queues`). The router
pauses the queue of a server that fails:

* After a time-out, a broken connection or a status 5xx it gets no further call until ``GET /health`` has answered.
* If that does not answer, or calls failed :data:`FAILURES` times in a row, the server is *ejected*: its calls in flight
  are given up, so that they go to the other servers at once, and it is probed at growing intervals. The first probe
  that is answered readmits it.
* A server that answered badly (a status 4xx, no score) :data:`BAD` times in a row gets no call until the next call ends
  at another server. If that was answered, the first one is ejected, but for its calls in flight, which go on. If it
  failed, the requests may be bad, and the first one goes on. After it is readmitted, one bad answer is enough.
* A server whose call was overtaken by one sent later to another, and that has answered nothing since its own began, has
  failed as by a time-out: it may hang.
* A call that fails by a time-out, a broken connection or a status 5xx goes to another server at once, which is none of
  its request's tries. With no other server it is. A request that would fail for good goes to another server once, if
  only one server has answered it badly. Tries go to servers that have not failed the request.
* If all servers have been ejected for ``patience_s``, calls start nevertheless: they fail, and the failure rule
  applies.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar
from zlib import crc32

from loguru import logger

from dataflow.errors import counted
from dataflow.rewards.limits.health_check import HealthCheck, brief, health_of
from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.queues import EndpointQueue
from dataflow.rewards.retry import _TRANSPORT, _is_one, retry_after_s, status_of
from dataflow.system import clock
from dataflow.system.http import THROTTLED
from dataflow.usercode.failures import causes_of

call_endpoint: contextvars.ContextVar[str] = contextvars.ContextVar("dataflow_call_endpoint", default="")

FAILURES = 3
"""Failed calls in a row after which a server is ejected although its health check answers."""
BAD = 10
"""Bad answers in a row after which a server is compared with another one."""
_HOLD_S = 4.0
"""A paused queue is paused for this many times the interval of the probes, each of which extends the pause."""

Routing = Literal["least", "prefix"]
T = TypeVar("T")


class ServerGivenUp(ConnectionError):
    """The server of a call was ejected while the call was in flight."""

    fix = "see the log of that server; raise the time-out if it was only slow"


@dataclass(frozen=True)
class Probing:
    """How ejected servers are probed.

    Attributes:
        first_s: interval before the second probe; it doubles with each further one.
        most_s: longest interval.
        limit_s: seconds that an answer may take.
        patience_s: after so long without any server calls start nevertheless.
    """

    first_s: float = 0.5
    most_s: float = 5.0
    limit_s: float = 5.0
    patience_s: float = 600.0


@dataclass(eq=False)
class _Server:
    name: str
    health: str
    queue: EndpointQueue | None = None
    failures: int = 0
    """Calls in a row that were not answered as they should."""
    bad: int = 0
    """Bad answers in a row."""
    last_error: str = ""
    """The last bad answer."""
    held: bool = False
    """Whether it gets no call until the next one ends at another server."""
    answered_at: float = -math.inf
    """When it last answered well, in seconds of ``clock.now()``."""
    interval_s: float = 0.0
    """Of its probes; kept until a call succeeds, so that one that fails again is probed less often."""
    ejected_at: float = math.inf
    out_since: float = math.inf
    """When it was ejected first since it last answered well."""
    watch: asyncio.Task[None] | None = None
    """Probes it while it gets no calls."""
    calls: set[asyncio.Timeout] = field(default_factory=set)
    """Of its calls in flight."""

    @property
    def ejected(self) -> bool:
        return self.ejected_at < math.inf


class Router:
    """The health of equal servers, for the agent that calls them; an agent finds it as the reward's ``router``.

    Args:
        urls: base addresses of the servers, which are also their names.
        slots: calls in flight at one server; None for the agent's limit.
        routing: ``least`` takes the emptiest server; ``prefix`` the one that had the same prompt before, unless it is
            much fuller.
        prompt_of: returns the prompt of a call from its arguments, for ``prefix``.
        what: what the servers are, for messages.
        probing: how ejected servers are probed.

    Attributes:
        counts: ``resent`` calls and ``ejections`` so far.
    """

    def __init__(
        self,
        urls: Sequence[str],
        slots: int | None = None,
        routing: Routing = "least",
        prompt_of: Callable[[Mapping[str, Any]], str] | None = None,
        what: str = "the judge",
        probing: Probing | None = None,
    ) -> None:
        self.names = tuple(urls)
        self._servers = {url: _Server(url, health_of(url)) for url in self.names}
        self._slots = slots
        self._prompt_of = prompt_of if routing == "prefix" and len(self.names) > 1 else None
        self._what = what
        self._probing = probing or Probing()
        self._health = HealthCheck(self._probing.limit_s)
        self._turn = itertools.cycle(self.names)
        self._changes: list[tuple[float, str, int]] = []
        self._patience: asyncio.TimerHandle | None = None
        self.counts = {"resent": 0, "ejections": 0}

    # --- the choice of a server ---------------------------------------------------------------------------------

    def limits(self, limits: Limits) -> Limits:
        """Returns limits with the servers as their pool; those without limits of their own have ``slots``."""
        most = min(self._slots or limits.concurrency, limits.concurrency)
        own = Limits(most, adaptive=limits.adaptive, floor=min(limits.floor, most))
        endpoints = {name: _at_most(limits.endpoints.get(name, own), most) for name in self.names}
        return replace(limits, endpoints=endpoints, pool=self.names)

    def prefers(self, arguments: Mapping[str, Any]) -> str:
        """Returns the server that should take a call with these arguments, or "" for any."""
        if self._prompt_of is None:
            return ""
        prompt = self._prompt_of(arguments)
        return self.names[crc32(prompt.encode(errors="surrogatepass")) % len(self.names)]

    def server(self) -> str:
        """Returns the server that the limiter chose for the current call; outside of an agent the next in turn."""
        chosen = call_endpoint.get()
        return chosen if chosen in self._servers else next(self._turn)

    # --- failures and probes ------------------------------------------------------------------------------------

    def open(self, queues: Mapping[str, EndpointQueue], patience_s: float | None = None) -> None:
        """Takes the queues of the servers, on the event loop that calls them."""
        for server in self._servers.values():
            server.queue = queues[server.name]
        if patience_s is not None:
            self._probing = replace(self._probing, patience_s=patience_s)

    async def guarded(self, name: str, sending: Awaitable[T]) -> T:
        """Awaits a call to a server, and gives it up when the server is ejected.

        Raises:
            ServerGivenUp: the server was ejected.
        """
        server = self._servers[name]
        try:
            async with asyncio.timeout(None) as limit:
                server.calls.add(limit)
                try:
                    return await sending
                finally:
                    server.calls.discard(limit)
        except TimeoutError:
            if not limit.expired():
                raise
        raise ServerGivenUp(f"{name} was given up: it did not answer other calls, nor GET /health")

    def answered(self, name: str, overtaken: Mapping[str, float] | None = None) -> None:
        """Takes note of a call that a server answered.

        Args:
            name: of the server.
            overtaken: servers that had not answered it when this call, which began later, was answered; when their own
                calls began.
        """
        server = self._servers.get(name)
        if server is None:
            return
        server.failures, server.bad, server.interval_s, server.answered_at = 0, 0, 0.0, clock.now()
        if server.out_since < math.inf and not server.ejected:
            seconds = clock.now() - server.out_since
            logger.info(f"{self._what}: server {server.name} answers again, after {seconds:.1f} s.")
            server.out_since = math.inf
        for other in self._held():
            if other is server:
                self._release(other)
            else:
                self._leave_out(other)
        for slow, begin in (overtaken or {}).items():
            if slow != name and self._servers[slow].answered_at < begin:
                self.failed(slow, TimeoutError("a call that was sent later to another server was answered first"))

    def failed(self, name: str, error: BaseException) -> bool:
        """Takes note of a failed call; returns whether another server should be called at once."""
        server = self._servers.get(name)
        if server is None or server.queue is None:
            return False
        lost, doubtful = is_lost(error), is_doubtful(error)
        for other in self._held() if lost or doubtful else ():
            if other is not server:
                self._release(other)
        if lost:
            server.failures += 1
            if server.watch is None:
                self._watch(server, partial(self._check, server, error))
            return self._has_other(server)
        if doubtful:
            server.bad, server.last_error = server.bad + 1, brief(error)
            if server.bad >= BAD and server.watch is None and self._has_other(server):
                server.held = True
                self._suspend(server)
        return False

    def may_differ(self, name: str, doubted: Sequence[str], error: BaseException) -> bool:
        """Whether a request that a server failed is worth a call to another: if that alone answered it badly."""
        server = self._servers.get(name)
        return server is not None and is_bad_reply(error) and not {*doubted} - {name} and self._has_other(server)

    def avoiding(self, name: str, avoids: Sequence[str]) -> tuple[str, ...]:
        """Returns the servers to avoid for a request that a server failed, and that avoided some before."""
        failed = (*avoids, name)
        return failed if set(failed) < set(self.names) else (name,)

    def _has_other(self, server: _Server) -> bool:
        """Whether another server takes calls."""
        others = (other for other in self._servers.values() if other is not server)
        return any(other.watch is None and not other.held for other in others)

    def _held(self) -> list[_Server]:
        return [server for server in self._servers.values() if server.held]

    def _release(self, server: _Server) -> None:
        assert server.queue is not None
        server.held, server.bad = False, 0
        server.queue.resume()

    def _watch(self, server: _Server, until: Callable[[], Awaitable[None]]) -> None:
        """Pauses a server's queue until a function is done."""

        async def watch() -> None:
            await until()
            server.watch = None
            assert server.queue is not None
            server.queue.resume()

        server.held = False
        self._suspend(server)
        server.watch = asyncio.get_running_loop().create_task(watch())

    async def _check(self, server: _Server, error: BaseException) -> None:
        """Ejects a server that does not answer its health check, or whose calls all fail."""
        why = await self._health.failure(server.health)
        if why or server.failures >= FAILURES:
            why = why or f"{counted(server.failures, 'call')} in a row failed, the last with {brief(error)}"
            calls = tuple(server.calls)
            then = f"{counted(len(calls), 'call')} in flight moved to other servers"
            self._eject(server, f"until it answers GET /health: {why}; {then}")
            now = asyncio.get_running_loop().time()
            for call in calls:
                call.reschedule(now)
            await self._probe_until_answered(server)

    def _leave_out(self, server: _Server) -> None:
        """Ejects a server that answers badly while another one answers well."""
        why = f"{counted(server.bad, 'call')} in a row failed here and not elsewhere, the last with {server.last_error}"
        self._eject(server, f"for some seconds: {why}")
        self._watch(server, partial(self._probe_until_answered, server))

    async def _probe_until_answered(self, server: _Server) -> None:
        probing = self._probing
        while True:
            server.interval_s = min(2 * server.interval_s or probing.first_s, probing.most_s)
            if self._patience is not None or not self._all_ejected():
                self._suspend(server)
            await asyncio.sleep(server.interval_s)
            if not await self._health.failure(server.health):
                break
        self._readmit(server)

    def _suspend(self, server: _Server) -> None:
        assert server.queue is not None
        server.queue.pause(_HOLD_S * (self._probing.limit_s + server.interval_s))

    def _eject(self, server: _Server, why: str) -> None:
        server.ejected_at = clock.now()
        self.counts["ejections"] += 1
        self._changes.append((server.ejected_at, server.name, 0))
        again = server.out_since < math.inf  # a server that stays bad is ejected every few seconds
        logger.log("DEBUG" if again else "WARNING", f"{self._what}: server {server.name} takes no calls {why}.")
        server.out_since = min(server.out_since, server.ejected_at)
        if self._all_ejected():
            self._patience = asyncio.get_running_loop().call_later(self._probing.patience_s, self._try_anyway)

    def _all_ejected(self) -> bool:
        return all(server.ejected for server in self._servers.values())

    def _try_anyway(self) -> None:
        """Lets calls start although no server has answered: they fail, and their requests end."""
        self._patience = None
        seconds = self._probing.patience_s
        logger.warning(f"{self._what}: no server has answered for {seconds:g} s; calls are tried nevertheless.")
        for server in self._servers.values():
            if server.queue is not None:
                server.queue.resume()

    def _readmit(self, server: _Server) -> None:
        server.ejected_at = math.inf
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        server.failures = FAILURES - 1  # one more failure ejects it again
        assert server.queue is not None
        self._changes.append((clock.now(), server.name, int(server.queue.limit)))

    # --- reports ------------------------------------------------------------------------------------------------

    def take_changes(self) -> list[tuple[float, str, int]]:
        """Returns (seconds of ``clock.now()``, server, its limit: 0 while it is ejected) of each change since then."""
        changes, self._changes = self._changes, []
        return changes

    def health(self) -> dict[str, bool]:
        """Returns which servers are not ejected."""
        return {server.name: not server.ejected for server in self._servers.values()}

    async def close(self) -> None:
        """Ends the probes."""
        if self._patience is not None:
            self._patience.cancel()
        probes = [server.watch for server in self._servers.values() if server.watch is not None]
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        await self._health.close()


def is_doubtful(error: BaseException) -> bool:
    """Whether a failure tells against its server if another one answers; a server may ask to be called later."""
    return is_bad_reply(error) and not retry_after_s(error)


def router_of(reward: Any) -> Router | None:
    """Returns the router of a reward object, if it has one."""
    found = reward.router
    return found if isinstance(found, Router) else None


def pooled(limits: Limits, router: Router | None) -> Limits:
    """Returns limits with the servers of a router as their pool, if there is one."""
    return limits if router is None else router.limits(limits)


def _at_most(limits: Limits, concurrency: int) -> Limits:
    most = min(limits.concurrency, concurrency)
    return replace(limits, concurrency=most, floor=min(limits.floor, most))


def is_lost(error: BaseException) -> bool:
    """Whether a server did not answer a call as it should: a time-out, a broken connection, or a status 5xx.

    A server that rejects a request for its load, or whose answer cannot be used, is not lost.
    """
    for one in causes_of(error):
        lost, status = getattr(one, "lost", None), status_of(one)
        if isinstance(lost, bool):
            return lost
        if status is not None:
            return status >= 500 and status not in THROTTLED
        if isinstance(one, TimeoutError | ConnectionError) or _is_one(one, _TRANSPORT):
            return True
    return False


def is_bad_reply(error: BaseException) -> bool:
    """Whether a server answered what no score can be read from, such as a status 4xx: another one may do better.

    An error without a status says so by an attribute ``of_server``.
    """
    chain = list(causes_of(error))
    if is_lost(error) or any(getattr(one, "fatal", None) is True for one in chain):
        return False
    return any(getattr(one, "of_server", None) is True or status_of(one) is not None for one in chain)
