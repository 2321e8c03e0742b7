"""Limits: how many calls may be in flight, and how many requests and tokens may be sent a minute.

Each endpoint has a queue in order of priority, the oldest step first. A free slot goes to the item with the best
priority of all queues that may start one. Nothing polls: queues are checked when an item or a limit changes.

Where several equal servers form a pool (``Limits.pool``), an item waits in the queues of all of them, and takes the
first slot that is free: that of the emptiest server, relative to its limit. So the server is chosen when a call starts.
A server that the item avoids takes it only while all others are paused; one that fails fast is always the emptiest.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.pause import Pause
from dataflow.rewards.limits.rates import Rates
from dataflow.system import clock

BACK_OFF = 0.7
"""Factor of an adaptive limit when the service is overloaded."""
PREFERENCE = 0.25
"""Share of a server's slots by which the server that an item prefers may be fuller than another."""


class Queued(Protocol):
    """An item of a queue. One with a smaller priority starts first; one that is not ``wanted`` any more is skipped.

    Attributes:
        endpoint: where it is sent; empty leaves the choice to the limiter, among the servers of ``Limits.pool``.
        tokens: estimate of what it uses.
        prefers: the server of the pool that takes it unless another is much emptier; empty for none.
        avoids: servers of the pool that take it only while all others are paused.
        second: whether a call for it runs already, at a server that it avoids: those never take it.
    """

    priority: tuple[int, int, int]
    endpoint: str
    tokens: int
    prefers: str
    avoids: tuple[str, ...]

    @property
    def second(self) -> bool: ...

    @property
    def wanted(self) -> bool: ...


_Heap = list[tuple[int, int, int, int, Queued]]


def _rates(limits: Limits) -> tuple[Rates, ...]:
    return (Rates(limits.rpm, limits.tpm),) if limits.rated else ()


class EndpointQueue:
    """Items that wait for one endpoint, and the calls in flight there.

    Args:
        name: of the endpoint; empty for that of all items without one.
        limits: of the endpoint.
        rates: rates that its calls must keep to; other queues may share them.
        on_change: called when an item may have become ready.
        on_bug: called with an error after which queued items would wait for ever.

    Attributes:
        limit: current limit of calls in flight; a float, since it grows by fractions.
        running: calls in flight.
        waited_s: seconds that items at the head waited for a rate limit.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        rates: Sequence[Rates],
        on_change: Callable[[], None],
        on_bug: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self.limits = limits
        self.limit = float(limits.concurrency)
        self.running = 0
        self.waited_s = 0.0
        self._changes: list[tuple[float, int]] = []
        self._heap: _Heap = []
        self._aside: _Heap = []
        """Items that avoid this server."""
        self.others: Sequence[EndpointQueue] = ()
        """Queues of the other servers of the pool."""
        self._sequence = 0
        self._on_change = on_change
        self._on_bug = on_bug
        self._cut_at = 0.0
        self._pause = Pause(self._resume)
        self._rates = rates
        self._permit: int | None = None
        """Tokens of the held permit to begin one request."""
        self._wake = asyncio.Event()
        self._permits_task = asyncio.get_running_loop().create_task(self._acquire_permits()) if rates else None

    def push(self, item: Queued) -> None:
        """Adds an item."""
        self._sequence += 1
        self._head()  # removes what other servers of a pool have started, also while this one starts nothing
        heapq.heappush(self._heap, (*item.priority, self._sequence, item))
        self._wake.set()

    def _head(self) -> Queued | None:
        """Returns the wanted item with the best priority, whether it may start or not."""
        heap = self._next()
        return heap[0][-1] if heap else None

    def _next(self) -> _Heap:
        """Returns the heap with the next item, empty for none; sets those aside that avoid this server."""
        heap, aside = self._heap, self._aside
        while heap and (not heap[0][-1].wanted or self._is_avoided(heap[0][-1])):
            entry = heapq.heappop(heap)
            if entry[-1].wanted and not entry[-1].second:
                heapq.heappush(aside, entry)
        while aside and not aside[0][-1].wanted:
            heapq.heappop(aside)
        if aside and (not heap or aside[0] < heap[0]):
            avoids = aside[0][-1].avoids
            if all(other.paused for other in self.others if other.name not in avoids):
                return aside
        return heap

    def _is_avoided(self, item: Queued) -> bool:
        return bool(self.others) and self.name in item.avoids

    def ready(self) -> Queued | None:
        """Returns the item that may start now, if any."""
        if self._pause.active or self.running >= int(self.limit):
            return None
        head = self._head()
        if self._rates and head is not None and not self._permit_covers(head):
            return None
        return head

    def _permit_covers(self, head: Queued) -> bool:
        """True if the held permit covers ``head``, which may have overtaken the item it was acquired for."""
        if self._permit is not None and head.tokens > self._permit:
            self._drop_permit()
            self._wake.set()
        return self._permit is not None

    def pop(self) -> None:
        """Removes the item that :meth:`ready` returned, and counts it as running."""
        item = heapq.heappop(self._next())[-1]
        self.running += 1
        if self._rates:
            self._permit = None
            for rates in self._rates:
                rates.begin(item.tokens)
            self._wake.set()

    def take_changes(self) -> list[tuple[float, int]]:
        """Returns (seconds of ``clock.now()``, limit) of each change since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def pause(self, seconds: float) -> None:
        """Starts nothing for a while, as the server asked."""
        self._pause.extend(seconds)
        self.refresh()
        if self.others:
            self._on_change()

    @property
    def paused(self) -> bool:
        """Whether it starts nothing for now."""
        return self._pause.active

    def resume(self) -> None:
        """Ends a pause."""
        self._pause.cancel()
        self._resume()

    @property
    def paused_until(self) -> float:
        """End of its last pause, in seconds of ``clock.now()``; 0 without one."""
        return self._pause.until

    def _resume(self) -> None:
        self._wake.set()
        self._on_change()

    def end(self, begun: float, overloaded: bool, extra_tokens: int, error: BaseException | None) -> None:
        """Counts a call as ended.

        Args:
            begun: when it began, in seconds of ``clock.now()``.
            overloaded: whether it ended since the service was overloaded.
            extra_tokens: tokens it used beyond its estimate.
            error: its error, if it failed.
        """
        saturated = self.running + 1 > int(self.limit)
        self.running -= 1
        for rates in self._rates:
            rates.correct(extra_tokens, clock.now() - begun)
        if self.limits.adaptive:
            self._adapt(begun, overloaded, saturated and error is None)

    def _adapt(self, begun: float, overloaded: bool, well: bool) -> None:
        before = int(self.limit)
        if overloaded:
            # Calls that were in flight together count once: after a cut only calls begun since then cut again.
            if begun >= self._cut_at:
                self.limit = max(float(self.limits.floor), self.limit * BACK_OFF)
                self._cut_at = clock.now()
        elif well:
            self.limit = min(float(self.limits.concurrency), self.limit + 1 / self.limit)
        if int(self.limit) != before:
            self._changes.append((clock.now(), int(self.limit)))

    async def _acquire_permits(self) -> None:
        """Holds one permit of the rates while an item could start with it."""
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._permit is None and self._may_start():
                    await self._acquire_permit()
        except Exception as error:
            self._on_bug(error)

    async def _acquire_permit(self) -> None:
        head = self._head()
        assert head is not None
        begin, tokens = time.perf_counter(), head.tokens
        for rates in self._rates:
            await rates.acquire(tokens)
        self.waited_s += time.perf_counter() - begin
        self._permit = tokens
        self.refresh()
        self._on_change()

    def _may_start(self) -> bool:
        """Whether an item could start here with a permit and a slot of the agent."""
        return not self._pause.active and self.running < int(self.limit) and self._head() is not None

    def _drop_permit(self) -> None:
        self._permit = None
        for rates in self._rates:
            rates.drop()

    def refresh(self) -> None:
        """Leaves a permit that cannot be used to other queues, or has the next one acquired."""
        if self._permit is not None and not self._may_start():
            self._drop_permit()
        elif self._rates:
            self._wake.set()

    def close(self) -> None:
        """Ends its timer and its task."""
        if self._permits_task is not None:
            self._permits_task.cancel()
        self._pause.cancel()


class Limiter:
    """Grants the slots of an agent to the items of its queues.

    Args:
        limits: of all calls and of single endpoints.
        start: called with an item and its queue, when its slot is taken.
        on_bug: called with an error after which queued items would wait for ever.
    """

    def __init__(
        self,
        limits: Limits,
        start: Callable[[Any, EndpointQueue], None],
        on_bug: Callable[[Exception], None] | None = None,
    ) -> None:
        self.limits = limits
        self._start = start
        self._filling = False
        self.running = 0
        self.peak = 0
        self.queues: dict[str, EndpointQueue] = {}
        self._on_bug = on_bug or _raise
        common = _rates(limits)
        for name, own in {"": limits, **limits.endpoints}.items():
            rates = common if own is limits else _rates(own) + common
            self.queues[name] = EndpointQueue(name, own, rates, self.fill, self._on_bug)
        self._all = list(self.queues.values())
        self._pool = [self.queues[name] for name in limits.pool]
        for queue in self._pool:
            queue.others = [other for other in self._pool if other is not queue]
        self._local: EndpointQueue | None = None

    def queue_of(self, endpoint: str) -> EndpointQueue:
        """Returns the queue of an endpoint; those without limits of their own share one."""
        return self.queues.get(endpoint, self.queues[""])

    def push(self, item: Queued) -> None:
        """Queues an item; :meth:`fill` starts it."""
        if self._pool and not item.endpoint:
            for queue in self._pool:
                queue.push(item)
        else:
            self.queue_of(item.endpoint).push(item)

    def push_local(self, item: Queued) -> None:
        """Queues an item that needs a slot but no service: rates, pauses and lowered limits do not apply to it."""
        if self._local is None:
            self._local = EndpointQueue("", Limits(self.limits.concurrency), (), self.fill, self._on_bug)
            self._all.append(self._local)
        self._local.push(item)

    def fill(self) -> None:
        """Starts the items with the best priority that may start, while there are free slots."""
        if self._filling:
            return  # a start that ends at once comes back here
        self._filling = True
        try:
            while self.running < self.limits.concurrency:
                best: tuple[tuple[int, int, int], EndpointQueue, Queued] | None = None
                for queue in self._all:
                    item = queue.ready()
                    if item is None:
                        continue
                    if (
                        best is None
                        or item.priority < best[0]
                        or (item is best[2] and _is_better(queue, best[1], item))
                    ):
                        best = item.priority, queue, item
                if best is None:
                    return
                _priority, queue, item = best
                queue.pop()
                self.running += 1
                self.peak = max(self.peak, self.running)
                try:
                    self._start(item, queue)
                except Exception as error:
                    self._on_bug(error)
        finally:
            self._filling = False

    def release(
        self,
        queue: EndpointQueue,
        begun: float,
        overloaded: bool = False,
        extra_tokens: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """Frees the slot of a call that has ended; see :meth:`EndpointQueue.end`."""
        self.running -= 1
        queue.end(begun, overloaded, extra_tokens, error)
        for other in self.queues.values():
            other.refresh()
        self.fill()

    def held_by(self, queue: EndpointQueue, since: float) -> str:
        """Returns what an item that starts now, and has taken its slot, has waited for.

        Args:
            queue: of the item.
            since: when it was queued, in seconds of ``clock.now()``.

        Returns:
            ``slot``, ``pause`` (of a service that answered with a Retry-After), ``rate``, or "" if it is not known.
        """
        if self.running >= self.limits.concurrency or queue.running >= int(queue.limit):
            return "slot"
        if queue.paused_until > since:
            return "pause"
        own = self.limits.endpoints.get(queue.name, self.limits)
        return "rate" if self.limits.rated or own.rated else ""

    def changes(self) -> list[tuple[float, str, int]]:
        """Returns (seconds of ``clock.now()``, endpoint, limit) of each change of a limit since the last call."""
        return sorted((at, name, limit) for name, queue in self.queues.items() for at, limit in queue.take_changes())

    def close(self) -> None:
        """Closes all queues."""
        for queue in self.queues.values():
            queue.close()


def _is_better(queue: EndpointQueue, other: EndpointQueue, item: Queued) -> bool:
    """Whether an item that two servers of a pool could take should go to the first."""
    return _fullness(queue, item) < _fullness(other, item)


def _fullness(queue: EndpointQueue, item: Queued) -> float:
    """Returns the share of a server's slots that are taken, changed by what the item prefers."""
    share = queue.running / max(1.0, queue.limit)
    return share - PREFERENCE if queue.name == item.prefers else share


def _raise(error: Exception) -> None:
    raise error
