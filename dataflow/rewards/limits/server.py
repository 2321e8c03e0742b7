"""The limit server: hands out the permits of one job to the agents that are connected to it.

All their requests stand in line in one :class:`~dataflow.rewards.limits.queues.Limiter`, the oldest step first, whoever
asks; so concurrency, rates and an adaptive limit hold for the job. The other side is in rewards/limits/shared.py.

Invariants:

* A request has a permit from when it may start until its agent says that its slot is free, and none is in two hands.
* A permit belongs to a connection. When that ends, however its process ended, its permits are free.
* Nothing polls: what one turn of the event loop brings goes out as one message to each agent.
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
from dataflow.rewards.limits.queues import Limiter, Limits, Line
from dataflow.system import clock

_HELLO_BYTES = 4096
_KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""So the kernel finds out within half a minute that a machine is gone; that a process is, it knows at once."""

Message = dict[str, Any]


class Address(NamedTuple):
    """Where a limit server listens, and what whoever connects must show."""

    host: str
    port: int
    key: str


class Wire(asyncio.Protocol):
    """A connection on which each line is a JSON object.

    Args:
        heard: told of each message.
        ended: told once that the connection is over, and why where it broke.
    """

    def __init__(self, heard: Callable[[Wire, Message], None], ended: Callable[[Wire, Exception | None], None]) -> None:
        self._heard = heard
        self._ended = ended
        self._buffer = b""
        self.known = False
        """Whether the other side has shown the key; until then it may not say much."""
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
            self._heard(self, json.loads(line))
        if not self.known and len(self._buffer) > _HELLO_BYTES:
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(self, exc)

    def say(self, message: Message) -> None:
        """Sends it, at once where the kernel takes it."""
        if not self._transport.is_closing():
            self._transport.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        self._transport.close()


@dataclass(eq=False, slots=True)
class _Request:
    """An agent's request, in line at the server; ``line`` is there once it has its permit."""

    holder: _Holder
    number: int
    endpoint: str
    place: tuple[int, int, int]
    tokens: int
    wanted: bool = True
    line: Line | None = None


@dataclass(eq=False)
class _Holder:
    """An agent, as the server knows it."""

    name: str
    wire: Wire
    requests: dict[int, _Request] = field(default_factory=dict)
    """Those that wait and those that have a permit, by the agent's number."""
    grants: list[int] = field(default_factory=list)
    levels: list[tuple[float, str, int]] = field(default_factory=list)
    waited_s: dict[str, float] = field(default_factory=dict)
    """Rate-limit waits that it knows of, by endpoint."""

    def running(self) -> int:
        return sum(request.line is not None for request in self.requests.values())


class LimitServer:
    """Hands out the permits of one job.

    Args:
        limits: of the whole job.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._key = secrets.token_hex(16)
        self._holders: dict[Wire, _Holder] = {}
        self._wires: set[Wire] = set()
        self._news: dict[_Holder, None] = {}
        self._server: asyncio.Server
        self._limiter: Limiter

    async def open(self, host: str = "127.0.0.1") -> Address:
        """Listens on a free port of this address."""
        loop = asyncio.get_running_loop()
        self._limiter = Limiter(self.limits, self._grant, on_bug=self._stop)
        self._server = await loop.create_server(self._connected, host, 0)
        return Address(host, self._server.sockets[0].getsockname()[1], self._key)

    def stats(self) -> dict[str, Any]:
        """Returns what is in flight job-wide, at most at once so far, by agent; the limits and what waits for them."""
        limiter = self._limiter
        return {
            "running": limiter.running,
            "peak": limiter.peak,
            "waiting": limiter.waiting(),
            "limit": {name: int(line.limit) for name, line in limiter.lines.items()},
            "throttled": sum(line.throttled for line in limiter.lines.values()),
            "rate_limit_wait_s": sum(line.waited_s for line in limiter.lines.values()),
            "holders": {holder.name: holder.running() for holder in self._holders.values()},
        }

    async def close(self) -> None:
        """Ends all connections: whoever still waits for a permit hears that the server is gone."""
        self._stop(None)
        await self._server.wait_closed()

    def _stop(self, _error: Exception | None) -> None:
        self._server.close()
        self._limiter.close()
        for wire in tuple(self._wires):
            wire.close()

    def _connected(self) -> Wire:
        wire = Wire(self._heard, self._left)
        self._wires.add(wire)
        return wire

    def _heard(self, wire: Wire, message: Message) -> None:
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
            other.wire.say({"over": f"another agent has come under its name, '{name}'; give each its own"})
            other.wire.close()
            self._left(other.wire, None)
        wire.known = True
        self._holders[wire] = _Holder(name, wire)

    def _take(self, holder: _Holder, message: Message) -> None:
        """Reads what an agent has to say. What wants a slot comes before what frees one: the oldest is to have it."""
        for number in message.get("drops", ()):
            self._end(holder, number, dropped=True)
        for endpoint, seconds in message.get("pauses", ()):
            self._line(endpoint).pause(seconds)
        for number, endpoint, place, tokens in message.get("wants", ()):
            request = _Request(holder, number, endpoint, tuple(place), tokens)
            holder.requests[number] = request
            self._limiter.push(request)
        # Once: the second of a message must not seem to have begun after the cut that the first one made.
        now = clock.now()
        for number, seconds, throttled, failed, tokens in message.get("ends", ()):
            self._end(holder, number, now - seconds, throttled, failed, tokens)
        self._limiter.fill()
        self._tell_levels()

    def _end(
        self,
        holder: _Holder,
        number: int,
        begun: float = 0.0,
        throttled: bool = False,
        failed: bool = False,
        tokens: int = 0,
        dropped: bool = False,
    ) -> None:
        """A request has ended, or is wanted no more, whether it has its permit yet or not."""
        request = holder.requests.pop(number, None)
        if request is None:
            return
        if request.line is None:
            request.wanted = False
            return
        # What never ran says nothing about the service, and used none of its tokens.
        tokens = -request.tokens if dropped else tokens
        error = _NO_NEWS if dropped or failed else None
        self._limiter.release(request.line, begun, throttled, tokens, error)

    def _grant(self, request: _Request, line: Line) -> None:
        request.line = line
        request.holder.grants.append(request.number)
        self._tell_soon(request.holder)

    def _tell_levels(self) -> None:
        if levels := self._limiter.changes():
            for holder in self._holders.values():
                holder.levels += levels
                self._tell_soon(holder)

    def _tell_soon(self, holder: _Holder) -> None:
        if not self._news:
            asyncio.get_running_loop().call_soon(self._tell)
        self._news[holder] = None

    def _tell(self) -> None:
        news, self._news = self._news, {}
        waited_s = {name: line.waited_s for name, line in self._limiter.lines.items() if line.waited_s}
        for holder in news:
            message: Message = {"grants": holder.grants, "levels": holder.levels}
            if waited_s != holder.waited_s:
                message["waited_s"] = holder.waited_s = waited_s
            holder.grants, holder.levels = [], []
            holder.wire.say(message)

    def _left(self, wire: Wire, _error: Exception | None) -> None:
        """A connection is over: its permits are free."""
        self._wires.discard(wire)
        holder = self._holders.pop(wire, None)
        if holder is None:
            return
        for request in holder.requests.values():
            request.wanted = False
        for number in list(holder.requests):
            self._end(holder, number, dropped=True)
        self._limiter.fill()

    def _line(self, endpoint: str) -> Line:
        return self._limiter.lines.get(endpoint, self._limiter.lines[""])


_NO_NEWS = DataflowError("its end says nothing of the service")
