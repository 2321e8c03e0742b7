"""The limit server: grants slots of one job's limits to the agents that are connected to it.

The requests of all agents wait in one :class:`~dataflow.rewards.limits.queues.Limiter`, the oldest step first; so
concurrency, rates and adaptive limits hold for the whole job. The agents' side is in rewards/limits/shared.py.

Invariants:

* A request holds its slot from its grant until its agent reports its end.
* A slot belongs to a connection. It is freed when the connection ends, however the process ended.
* Nothing polls: the grants of one turn of the event loop are sent as one message to each agent.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from dataflow.errors import DataflowError
from dataflow.rewards.limits.endpoint_queue import EndpointQueue
from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.queues import Limiter
from dataflow.system import clock

_HELLO_BYTES = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""The kernel detects a lost machine within half a minute; it detects a process that ended at once."""

Message = dict[str, Any]


class Address(NamedTuple):
    """Where a limit server listens, and the key that a client must send."""

    host: str
    port: int
    key: str


class Wire(asyncio.Protocol):
    """A connection on which each line is a JSON object.

    Args:
        on_message: called with each message.
        on_end: called once when the connection ends, with its error if it broke.
    """

    def __init__(
        self, on_message: Callable[[Wire, Message], None], on_end: Callable[[Wire, Exception | None], None]
    ) -> None:
        self._on_message = on_message
        self._on_end = on_end
        self._buffer = b""
        self.trusted = False
        """Whether the other side has sent the key; until then its messages are limited in size."""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def data_received(self, data: bytes) -> None:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            self._on_message(self, json.loads(line))
        if not self.trusted and len(self._buffer) > _HELLO_BYTES:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end(self, exc)

    def send(self, message: Message) -> None:
        """Sends a message."""
        if not self._transport.is_closing():
            self._transport.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        self._transport.close()


@dataclass(eq=False, slots=True)
class _Request:
    """An agent's request at the server; ``queue`` is set when its slot is granted."""

    holder: _Holder
    number: int
    endpoint: str
    priority: tuple[int, int, int]
    tokens: int
    prefers: str = ""
    avoids: tuple[str, ...] = ()
    second: bool = False
    wanted: bool = True
    queue: EndpointQueue | None = None


@dataclass(eq=False)
class _Holder:
    """The server's state of one agent."""

    name: str
    wire: Wire
    requests: dict[int, _Request] = field(default_factory=dict)
    """Waiting and granted requests, by the number that the agent gave them."""
    grants: list[int] = field(default_factory=list)
    placed: list[tuple[int, str]] = field(default_factory=list)
    """Grants of a pool, each with the server that was chosen."""
    levels: list[tuple[float, str, int]] = field(default_factory=list)
    waited_s: dict[str, float] = field(default_factory=dict)
    """Rate-limit waits sent to it, by endpoint."""

    def running(self) -> int:
        return sum(request.queue is not None for request in self.requests.values())


class LimitServer:
    """Grants the slots of one job.

    Args:
        limits: of the whole job.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._key = secrets.token_hex(16)
        self._holders: dict[Wire, _Holder] = {}
        self._wires: set[Wire] = set()
        self._updates: dict[_Holder, None] = {}
        self._server: asyncio.Server
        self._limiter: Limiter

    async def open(self, host: str = "127.0.0.1") -> Address:
        """Listens on a free port of this address."""
        loop = asyncio.get_running_loop()
        self._limiter = Limiter(self.limits, self._grant, on_bug=self._stop)
        self._server = await loop.create_server(self._connected, host, 0)
        return Address(host, self._server.sockets[0].getsockname()[1], self._key)

    def stats(self) -> dict[str, Any]:
        """Returns the calls in flight, their peak and their number by agent, the limits, and the waiting requests."""
        limiter = self._limiter
        return {
            "running": limiter.running,
            "peak": limiter.peak,
            "waiting": limiter.waiting(),
            "limit": {name: int(queue.limit) for name, queue in limiter.queues.items()},
            "overloads": sum(queue.overloads for queue in limiter.queues.values()),
            "rate_limit_wait_s": sum(queue.waited_s for queue in limiter.queues.values()),
            "holders": {holder.name: holder.running() for holder in self._holders.values()},
        }

    async def close(self) -> None:
        """Ends all connections; agents fail the requests that still wait."""
        self._stop(None)
        await self._server.wait_closed()

    def _stop(self, _error: Exception | None) -> None:
        self._server.close()
        self._limiter.close()
        for wire in tuple(self._wires):
            wire.close()

    def _connected(self) -> Wire:
        wire = Wire(self._on_message, self._on_lost)
        self._wires.add(wire)
        return wire

    def _on_message(self, wire: Wire, message: Message) -> None:
        holder = self._holders.get(wire)
        if holder is None:
            self._admit(wire, message)
        else:
            self._take(holder, message)

    def _admit(self, wire: Wire, hello: Message) -> None:
        if not hmac.compare_digest(str(hello.get("key", "")), self._key):
            wire.close()
            return
        name = str(hello["name"])
        for other in [holder for holder in self._holders.values() if holder.name == name]:
            other.wire.send({"over": f"another agent has come under its name, '{name}'; give each its own"})
            other.wire.close()
            self._on_lost(other.wire, None)
        wire.trusted = True
        self._holders[wire] = _Holder(name, wire)

    def _take(self, holder: _Holder, message: Message) -> None:
        """Handles an agent's message: new requests before ended ones, so that a freed slot goes to the oldest."""
        for number in message.get("drops", ()):
            self._end(holder, number, dropped=True)
        for endpoint, seconds in message.get("pauses", ()):
            queue = self._limiter.queue_of(endpoint)
            if seconds:
                queue.pause(seconds)
            else:
                queue.resume()
        for number, endpoint, priority, tokens, prefers, avoids, second in message.get("wants", ()):
            request = _Request(holder, number, endpoint, tuple(priority), tokens, prefers, tuple(avoids), second)
            holder.requests[number] = request
            self._limiter.push(request)
        # Read once: the second call of a message must not seem to have begun after the cut that the first one caused.
        now = clock.now()
        for number, seconds, overloaded, failed, tokens in message.get("ends", ()):
            self._end(holder, number, now - seconds, overloaded, failed, tokens)
        self._limiter.fill()
        self._send_levels()

    def _end(
        self,
        holder: _Holder,
        number: int,
        begun: float = 0.0,
        overloaded: bool = False,
        failed: bool = False,
        tokens: int = 0,
        dropped: bool = False,
    ) -> None:
        """Ends a request, or removes one that is not wanted any more, granted or not."""
        request = holder.requests.pop(number, None)
        if request is None:
            return
        if request.queue is None:
            request.wanted = False
            return
        # A request that never ran is not a measure of the service, and used no tokens.
        tokens = -request.tokens if dropped else tokens
        error = _NO_RESULT if dropped or failed else None
        self._limiter.release(request.queue, begun, overloaded, tokens, error)

    def _grant(self, request: _Request, queue: EndpointQueue) -> None:
        request.queue = queue
        request.wanted = False  # in the other queues of a pool
        if queue.name == request.endpoint or queue.name not in self.limits.pool:
            request.holder.grants.append(request.number)
        else:
            request.holder.placed.append((request.number, queue.name))
        self._send_soon(request.holder)

    def _send_levels(self) -> None:
        if levels := self._limiter.changes():
            for holder in self._holders.values():
                holder.levels += levels
                self._send_soon(holder)

    def _send_soon(self, holder: _Holder) -> None:
        if not self._updates:
            asyncio.get_running_loop().call_soon(self._send)
        self._updates[holder] = None

    def _send(self) -> None:
        updates, self._updates = self._updates, {}
        waited_s = {name: queue.waited_s for name, queue in self._limiter.queues.items() if queue.waited_s}
        for holder in updates:
            message: Message = {"grants": holder.grants, "levels": holder.levels}
            if waited_s != holder.waited_s:
                message["waited_s"] = holder.waited_s = waited_s
            if holder.placed:
                message["placed"], holder.placed = holder.placed, []
            holder.grants, holder.levels = [], []
            holder.wire.send(message)

    def _on_lost(self, wire: Wire, _error: Exception | None) -> None:
        """Frees the slots of a connection that has ended."""
        self._wires.discard(wire)
        holder = self._holders.pop(wire, None)
        if holder is None:
            return
        for request in holder.requests.values():
            request.wanted = False
        for number in list(holder.requests):
            self._end(holder, number, dropped=True)
        self._limiter.fill()


_NO_RESULT = DataflowError("its end is not a measure of the service")
