"""Shared limits: the agents of one job, in any number of processes, stay within its limits together.

Each agent has one connection to the limit server (rewards/limits/server.py), on which it says what waits and what has
ended, and hears what may start; all of one turn of the event loop in one message. So a request costs about one
message in each direction, and fewer under load. They go through a socket and not as calls of a Ray actor, each of
which takes either process a millisecond of CPU time: more than all else that is done for a request.

An agent that loses the server hears of it at once: nobody waits for a permit that cannot come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dataflow.errors import DataflowError, RewardFailed
from dataflow.rewards.limits.queues import Limits, Line, Waiting
from dataflow.rewards.limits.server import Address, LimitServer, Message, Wire
from dataflow.system import clock

_CONNECT_S = 30.0
_STEPS = 64  # in flight at once, at most, for what they count from to be known


class SharedLimits:
    """An agent's connection to the limit server, for ``RewardAgent(shared=SharedLimits(address, "agent 1"))``.

    The agent's own ``limits`` must be the job's: their endpoints have lines, and no agent starts more than the job may.

    Args:
        address: of the server.
        name: of the agent; one that comes later under the same name takes its place.
    """

    def __init__(self, address: Address, name: str) -> None:
        self.address = address
        self.name = name
        self._lines: dict[str, SharedLine] = {}
        self._waiting: dict[int, tuple[SharedLine, Waiting]] = {}
        self._number = 0
        self._first: dict[tuple[int, int], int] = {}
        self._news: dict[str, list[Any]] = {}
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._over = False
        self._changed: Callable[[], None]
        self._on_bug: Callable[[Exception], None]

    def __call__(self, endpoint: str) -> SharedPermits:
        return SharedPermits(self, endpoint)

    def open(self, line: SharedLine, changed: Callable[[], None], on_bug: Callable[[Exception], None]) -> None:
        """Takes one more line; with the first it connects."""
        self._lines[line.name] = line
        self._changed, self._on_bug = changed, on_bug
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        loop, (host, port, key) = asyncio.get_running_loop(), self.address
        try:
            async with asyncio.timeout(_CONNECT_S):
                _transport, wire = await loop.create_connection(lambda: Wire(self._heard, self._ended), host, port)
        except OSError as error:
            self._lose(error)
            return
        self._wire, wire.known = wire, True
        wire.say({"key": key, "name": self.name})
        self._flush()

    def want(self, line: SharedLine, item: Waiting) -> None:
        """Asks for a permit."""
        self._number += 1
        self._waiting[self._number] = line, item
        self.say("wants", [self._number, line.name, self._place(item), item.tokens])

    def _place(self, item: Waiting) -> tuple[int, int, int]:
        """Returns its place among those of all agents, each of which counts a step's requests from the first."""
        kind, step, sequence = item.place
        first = self._first.setdefault((kind, step), sequence)
        if len(self._first) > _STEPS:
            del self._first[next(iter(self._first))]
        return kind, step, sequence - first

    def say(self, kind: str, what: Any) -> None:
        """Tells the server, with all else of this turn of the loop."""
        if not self._news and self._wire is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._news.setdefault(kind, []).append(what)

    def _flush(self) -> None:
        news, self._news = self._news, {}
        if news and self._wire is not None:
            self._wire.say(news)

    def _heard(self, _wire: Wire, message: Message) -> None:
        if "over" in message:
            self._lose(DataflowError(message["over"]))
            return
        for at, endpoint, limit in message["levels"]:
            if line := self._lines.get(endpoint):
                line.limit = limit
                line.changes.append((at, limit))
        for endpoint, seconds in message.get("waited_s", {}).items():
            if line := self._lines.get(endpoint):
                line.waited_s = seconds
        granted = [(number, *self._waiting.pop(number)) for number in message["grants"] if number in self._waiting]
        for number, line, item in granted:
            line.grant(number, item)
        if not all(item.wanted for _number, _line, item in granted):
            self._drop_unwanted()
        self._changed()

    def _drop_unwanted(self) -> None:
        """What is wanted no more shows only when its turn comes; then others of its kind may wait behind it."""
        for number, (_line, item) in list(self._waiting.items()):
            if not item.wanted:
                del self._waiting[number]
                self.say("drops", number)

    def waiting(self, line: SharedLine) -> int:
        return sum(item.wanted for of, item in self._waiting.values() if of is line)

    def _ended(self, _wire: Wire, error: Exception | None) -> None:
        self._lose(error or ConnectionError("it closed the connection"))

    def _lose(self, error: Exception) -> None:
        if self._over:
            return
        self.close()
        host, port, _key = self.address
        failed = RewardFailed(
            f"the server of the job's shared reward limits, {host}:{port}, is lost to agent '{self.name}' "
            f"({str(error) or type(error).__name__}): no further request may start; see why its process ended, and "
            "start the run again."
        )
        failed.__cause__ = error
        self._on_bug(failed)

    def close(self) -> None:
        """Ends the connection, and with it the agent's permits."""
        self._over = True
        if self._wire is not None:
            self._flush()
            self._wire.close()
        elif self._connecting is not None and self._connecting is not asyncio.current_task():
            self._connecting.cancel()


class SharedPermits:
    """One endpoint of :class:`SharedLimits`."""

    def __init__(self, shared: SharedLimits, endpoint: str) -> None:
        self._shared = shared
        self._endpoint = endpoint

    def line(self, limits: Limits, changed: Callable[[], None], on_bug: Callable[[Exception], None]) -> Line:
        line = SharedLine(self._endpoint, limits, self._shared, changed, on_bug)
        self._shared.open(line, changed, on_bug)
        return line


class SharedLine(Line):
    """A line whose requests stand at the server; here are only those that have a permit and have not started."""

    def __init__(
        self,
        name: str,
        limits: Limits,
        shared: SharedLimits,
        changed: Callable[[], None],
        on_bug: Callable[[Exception], None],
    ) -> None:
        super().__init__(name, replace(limits, adaptive=False), (), changed, on_bug)
        self._shared = shared
        self._granted: deque[tuple[int, Waiting]] = deque()
        self._live: deque[int] = deque()

    def push(self, item: Waiting) -> None:
        self._shared.want(self, item)

    def grant(self, number: int, item: Waiting) -> None:
        """The server lets it start."""
        self._granted.append((number, item))

    def ready(self) -> Waiting | None:
        while self._granted and not self._granted[0][1].wanted:
            self._shared.say("drops", self._granted.popleft()[0])
        return self._granted[0][1] if self._granted and self._paused is None else None

    def pop(self) -> None:
        self._live.append(self._granted.popleft()[0])
        self.running += 1

    def waiting(self) -> int:
        return self._shared.waiting(self) + sum(item.wanted for _number, item in self._granted)

    def pause(self, seconds: float) -> None:
        super().pause(seconds)
        self._shared.say("pauses", [self.name, seconds])

    def ended(self, begun: float, throttled: bool, extra_tokens: int, error: BaseException | None) -> None:
        self.running -= 1
        self.throttled += throttled
        # Which of the permits is the same to the server, as it is told how long ago the call began.
        seconds = clock.now() - begun
        self._shared.say("ends", [self._live.popleft(), seconds, throttled, error is not None, extra_tokens])

    def close(self) -> None:
        super().close()
        self._shared.close()


class LimitActor:
    """A limit server in a Ray actor of its own."""

    async def open(self, limits: Limits, anchor: clock.Anchor) -> Address:
        """Listens on this node's address."""
        import ray

        clock.adopt(anchor)
        self.server = LimitServer(limits)
        return await self.server.open(ray.util.get_node_ip_address())

    async def stats(self) -> dict[str, Any]:
        return self.server.stats()

    async def alive(self) -> None:
        """Does not return: whoever waits for it hears of the actor's death."""
        await asyncio.Event().wait()


def start_limits(limits: Limits) -> tuple[Any, Address]:
    """Starts a limit server in a Ray actor; returns the actor, which ends with its last handle, and the address.

    Args:
        limits: of the whole job.
    """
    import ray

    actor = ray.remote(num_cpus=0)(LimitActor).remote()
    return actor, ray.get(actor.open.remote(limits, clock.anchor()))
