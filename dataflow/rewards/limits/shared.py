"""Shared limits: the agents of one job, in any number of processes, keep to its limits together.

Each agent has one connection to the limit server (rewards/limits/server.py). It sends its new and ended requests and
receives grants; all of one turn of the event loop in one message, so that a request costs about one message in each
direction, and fewer under load. They use a socket instead of calls of a Ray actor, each of which takes a millisecond of
CPU time in both processes: more than everything else that is done for a request.

An agent that loses the server fails at once, so that no request waits for a grant that cannot come.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from dataflow.cluster.nodes import beside
from dataflow.errors import DataflowError, RewardFailed
from dataflow.rewards.limits.endpoint_queue import Queued
from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.pause import Pause
from dataflow.rewards.limits.server import Address, LimitServer, Message, Wire
from dataflow.system import clock
from dataflow.system.address import host_port
from dataflow.system.secrets import redact_logs

_CONNECT_S = 30.0
_STEPS = 64  # steps in flight whose first sequence number is remembered


class SharedLimits:
    """An agent's connection to the limit server, for ``RewardAgent(shared=SharedLimits(address, "agent 1").queue)``.

    The agent's own ``limits`` must be the job's, since their endpoints have queues and they bound each agent.

    Args:
        address: of the server.
        name: of the agent; a later agent with the same name replaces it.
    """

    def __init__(self, address: Address, name: str) -> None:
        self.address = address
        self.name = name
        self._queues: dict[str, SharedQueue] = {}
        self._waiting: dict[int, tuple[SharedQueue, Queued]] = {}
        self._number = 0
        self._first: dict[tuple[int, int], int] = {}
        self._unsent: dict[str, list[Any]] = {}
        self._wire: Wire | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._closed = False
        self._on_change: Callable[[], None]
        self._on_bug: Callable[[Exception], None]

    def queue(
        self, name: str, limits: Limits, on_change: Callable[[], None], on_bug: Callable[[Exception], None]
    ) -> SharedQueue:
        """Returns the queue of an endpoint, and connects with the first; a ``QueueFactory``."""
        queue = self._queues[name] = SharedQueue(name, limits, self, on_change)
        self._on_change, self._on_bug = on_change, on_bug
        if self._connecting is None:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        return queue

    async def _connect(self) -> None:
        loop, (host, port, key) = asyncio.get_running_loop(), self.address
        try:
            async with asyncio.timeout(_CONNECT_S):
                _transport, wire = await loop.create_connection(
                    lambda: Wire(self._on_message, self._on_lost), host, port
                )
        except OSError as error:
            self._lose(error)
            return
        self._wire, wire.trusted = wire, True
        wire.send({"key": key, "name": self.name})
        self._flush()

    def request(self, queue: SharedQueue, item: Queued) -> None:
        """Requests a grant for an item."""
        self._number += 1
        self._waiting[self._number] = queue, item
        how = [item.tokens, item.prefers, item.avoids, item.second]
        self.send("wants", [self._number, queue.name, self._priority(item), *how])

    def _priority(self, item: Queued) -> tuple[int, int, int]:
        """Returns the item's priority among all agents, each of which counts a step's requests from its first."""
        kind, step, sequence = item.priority
        first = self._first.setdefault((kind, step), sequence)
        if len(self._first) > _STEPS:
            del self._first[next(iter(self._first))]
        return kind, step, sequence - first

    def send(self, kind: str, what: Any) -> None:
        """Sends something to the server, in one message with everything else of this turn of the loop."""
        if not self._unsent and self._wire is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.setdefault(kind, []).append(what)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, {}
        if unsent and self._wire is not None:
            self._wire.send(unsent)

    def _on_message(self, _wire: Wire, message: Message) -> None:
        if "over" in message:
            self._lose(DataflowError(message["over"]))
            return
        for at, endpoint, limit in message["levels"]:
            if queue := self._queues.get(endpoint):
                queue.set_limit(at, limit)
        for endpoint, seconds in message.get("waited_s", {}).items():
            if queue := self._queues.get(endpoint):
                queue.waited_s = seconds
        granted = [(number, *self._waiting.pop(number)) for number in message["grants"] if number in self._waiting]
        for number, endpoint in message.get("placed", ()):  # of a pool, whose server is chosen only now
            if number in self._waiting:
                granted.append((number, self._queues[endpoint], self._waiting.pop(number)[1]))
        for number, queue, item in granted:
            queue.grant(number, item)
        if not all(item.wanted for _number, _queue, item in granted):
            self._drop_unwanted()
        self._on_change()

    def request_again(self, number: int, item: Queued) -> None:
        """Gives a grant back that cannot be used, as its server starts nothing for now, and requests another."""
        self.send("drops", number)
        self.request(self._queues[item.endpoint], item)

    def _drop_unwanted(self) -> None:
        """Removes cancelled items; their cancellation is noticed only when one of them is granted."""
        for number, (_queue, item) in list(self._waiting.items()):
            if not item.wanted:
                del self._waiting[number]
                self.send("drops", number)

    def waiting(self, queue: SharedQueue) -> int:
        """Returns the number of wanted items of a queue that are not granted."""
        return sum(item.wanted for of, item in self._waiting.values() if of is queue)

    def _on_lost(self, _wire: Wire, error: Exception | None) -> None:
        self._lose(error or ConnectionError("it closed the connection"))

    def _lose(self, error: Exception) -> None:
        if self._closed:
            return
        self.close()
        host, port, _key = self.address
        failed = RewardFailed(
            f"the server of the job's shared reward limits, {host_port(host, port)}, is lost to agent '{self.name}' "
            f"({str(error) or type(error).__name__}): no further request may start; see why its process ended, and "
            "start the run again."
        )
        failed.__cause__ = error
        self._on_bug(failed)

    def close(self) -> None:
        """Ends the connection, which frees the agent's slots."""
        self._closed = True
        if self._wire is not None:
            self._flush()
            self._wire.close()
        elif self._connecting is not None and self._connecting is not asyncio.current_task():
            self._connecting.cancel()


class SharedQueue:
    """The queue of an endpoint whose limits agents share; an :class:`~dataflow.rewards.limits.queues.EndpointQueue`.

    Its items wait at the server. Here are only the granted ones that have not started.

    Args:
        name: of the endpoint.
        limits: of the whole job at this endpoint.
        shared: the connection to the server.
        on_change: called when an item may have become ready.
    """

    def __init__(self, name: str, limits: Limits, shared: SharedLimits, on_change: Callable[[], None]) -> None:
        self.name = name
        self.limit = float(limits.concurrency)
        self.running = 0
        self.waited_s = 0.0
        self.overloads = 0
        self._changes: list[tuple[float, int]] = []
        self._shared = shared
        self._on_change = on_change
        self._pause = Pause(on_change)
        self._granted: deque[tuple[int, Queued]] = deque()
        self._running: deque[int] = deque()

    def push(self, item: Queued) -> None:
        self._shared.request(self, item)

    def grant(self, number: int, item: Queued) -> None:
        """Adds an item that the server lets start."""
        self._granted.append((number, item))
        if self._pause.active:
            self._return_grants()

    def set_limit(self, at: float, limit: int) -> None:
        """Takes over a change of the job's limit."""
        self.limit = limit
        self._changes.append((at, limit))

    def ready(self) -> Queued | None:
        while self._granted and not self._granted[0][1].wanted:
            self._shared.send("drops", self._granted.popleft()[0])
        return self._granted[0][1] if self._granted and not self._pause.active else None

    def pop(self) -> None:
        self._running.append(self._granted.popleft()[0])
        self.running += 1

    def waiting(self) -> int:
        return self._shared.waiting(self) + sum(item.wanted for _number, item in self._granted)

    def take_changes(self) -> list[tuple[float, int]]:
        changes, self._changes = self._changes, []
        return changes

    def pause(self, seconds: float) -> None:
        self._pause.extend(seconds)
        self._shared.send("pauses", [self.name, seconds])
        self._return_grants()

    def _return_grants(self) -> None:
        """Returns the grants of items that another server of the pool may take."""
        for number, item in [entry for entry in self._granted if entry[1].endpoint != self.name]:
            self._granted.remove((number, item))
            if item.wanted:
                self._shared.request_again(number, item)
            else:
                self._shared.send("drops", number)

    def resume(self) -> None:
        self._pause.cancel()
        self._shared.send("pauses", [self.name, 0])
        self._on_change()

    @property
    def paused_until(self) -> float:
        return self._pause.until

    def end(self, begun: float, overloaded: bool, extra_tokens: int, error: BaseException | None) -> None:
        self.running -= 1
        self.overloads += overloaded
        # Any number of a running call will do, as the server also gets the age of the call.
        seconds = clock.now() - begun
        self._shared.send("ends", [self._running.popleft(), seconds, overloaded, error is not None, extra_tokens])

    def refresh(self) -> None:
        """Does nothing: the server decides which item may start."""

    def close(self) -> None:
        self._pause.cancel()
        self._shared.close()


class LimitActor:
    """A limit server in its own Ray actor."""

    async def open(self, limits: Limits, anchor: clock.Anchor) -> Address:
        """Listens on this node's address."""
        import ray

        redact_logs()
        clock.adopt(anchor)
        self.server = LimitServer(limits)
        return await self.server.open(ray.util.get_node_ip_address())

    async def stats(self) -> dict[str, Any]:
        return self.server.stats()

    async def alive(self) -> None:
        """Never returns; its call fails when the actor dies."""
        await asyncio.Event().wait()


def start_limits(limits: Limits) -> tuple[Any, Address]:
    """Starts a limit server in a Ray actor; returns the actor, which ends with its last handle, and the address.

    Args:
        limits: of the whole job.
    """
    import ray

    actor = ray.remote(LimitActor).options(num_cpus=0, **beside()).remote()
    return actor, ray.get(actor.open.remote(limits, clock.anchor()))
