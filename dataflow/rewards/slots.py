"""Slots: how many reward calls may be in flight, and how fast they may begin.

A free slot goes to the oldest request: training steps by number, then validations. So a straggler holds one slot and
delays nothing else. Each endpoint has a queue with limits of its own within those of all calls. Nothing polls: queues
are looked at when a request or a limit changes, and at the time at which a rate or a pause next lets one begin.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from loguru import logger

from dataflow.errors import ConfigError, nearest
from dataflow.system import clock

BACK_OFF = 0.7
"""Factor of an adaptive limit when the service is overloaded."""
LONG_S = 60.0
"""Seconds for which a service may ask for a pause without a warning."""


@dataclass(frozen=True)
class Limits:
    """Limits of a service.

    Attributes:
        concurrency: calls in flight; the ceiling of an adaptive limit.
        rpm: requests that may begin in any 60 seconds; None for no limit.
        tpm: tokens that may be used in 60 seconds; needs a reward object with ``tokens``, or replies with a column
            ``tokens``. None for no limit.
        adaptive: lowers the limit on 429 and time-outs, and raises it by one for each round without them.
        floor: smallest value of an adaptive limit.
        endpoints: limits of single endpoints of a reward object with ``endpoint``, within the limits of all calls.

    Raises:
        ConfigError: a number out of range.
    """

    concurrency: int = 64
    rpm: float | None = None
    tpm: float | None = None
    adaptive: bool = False
    floor: int = 1
    endpoints: Mapping[str, Limits] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"reward.concurrency={self.concurrency}; give 1 or more.")
        for name in ("rpm", "tpm"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"reward.{name}={rate}; give a number above 0, or null.")
        if not 1 <= self.floor <= self.concurrency:
            raise ConfigError(f"reward.floor={self.floor}; give 1 to reward.concurrency={self.concurrency}.")


def check_endpoints(reward: Any, limits: Limits) -> None:
    """Checks that limits of endpoints name endpoints of the reward object; others would limit nothing.

    Args:
        reward: its method ``endpoint`` returns where a request is sent; ``endpoints`` may list all names.
        limits: limits of all calls and of single endpoints.

    Raises:
        ConfigError: it has no method ``endpoint``, or no endpoint of that name.
    """
    known = getattr(reward, "endpoints", None)
    if limits.endpoints and known is None and not callable(getattr(reward, "endpoint", None)):
        first = next(iter(limits.endpoints))
        fix = "give it a method endpoint(**arguments), or limit all calls (reward.concurrency, reward.rpm, reward.tpm)"
        raise ConfigError(f"reward.endpoints={{{first}: ...}}: the reward does not say which endpoint it calls; {fix}.")
    if not isinstance(known, list | tuple):
        return
    for name in limits.endpoints:
        if name not in known:
            hint = nearest(name, known) or f"; there are {', '.join(map(str, known))}."
            raise ConfigError(f"reward.endpoints={{{name}: ...}}: the reward calls no such endpoint{hint}")


def _now() -> float:
    return asyncio.get_running_loop().time()


class Pace:
    """Spaces what begins evenly, so that no 60 seconds have more than an amount.

    A second's share may begin at once. The steady rate is lowered by it, so that no 60 seconds hold more than ``most``.

    Args:
        most: amount in 60 seconds. A larger one begins when nothing is owed, and holds up the next for longer.
    """

    def __init__(self, most: float) -> None:
        self._burst = max(1.0, most / 60)
        self._rate = (most - self._burst + 1) / 60
        self._paid_at = -math.inf
        """Time of the loop at which all that has begun is paid for."""

    def ready_at(self, amount: float) -> float:
        """Returns the time of the loop from which on an amount may begin."""
        return self._paid_at - max(0.0, self._burst - amount) / self._rate

    def begin(self, amount: float, now: float) -> None:
        """Counts an amount that begins now."""
        self._paid_at = max(self._paid_at, now) + amount / self._rate

    def correct(self, more: float) -> None:
        """Corrects an amount to what it really was, by ``more``, which may be negative."""
        self._paid_at += more / self._rate


@dataclass(eq=False)
class Item:
    """What waits for a slot; the one with the smallest priority goes first."""

    priority: tuple[int, int, int]
    queued_at: float
    """When it was submitted, in seconds of ``clock.now()``."""
    endpoint: str = ""
    tokens: int = 0
    """Estimate of what a call uses."""
    held_by: str = ""
    """What it waited for last: a free ``slot``, the ``rate``, the end of a ``pause``; "" for nothing."""
    waiting: asyncio.Future[Slot] | None = None


class Queue:
    """The requests that wait for one endpoint, and the calls in flight there.

    Attributes:
        limit: current limit of calls in flight; a float, since it grows by fractions.
        running: calls in flight.
        waited_s: seconds for which requests at the head waited for a rate.
    """

    def __init__(self, name: str, limits: Limits, shared: tuple[Pace | None, Pace | None] = (None, None)) -> None:
        self.name, self.limits = name, limits
        self.limit, self.running, self.waited_s = float(limits.concurrency), 0, 0.0
        own = (None if limits.rpm is None else Pace(limits.rpm), None if limits.tpm is None else Pace(limits.tpm))
        self.own = own
        self._requests = [pace for pace in (own[0], shared[0]) if pace is not None]
        self._tokens = [pace for pace in (own[1], shared[1]) if pace is not None]
        self.rated = bool(self._requests or self._tokens)
        self.paused_until = -math.inf
        """In seconds of the loop, as all times here but those of ``changes``."""
        self.changes: list[tuple[float, int]] = []
        self._held_since = math.inf
        self._cut_at = -math.inf
        self._heap: list[tuple[tuple[int, int, int], int, Item, asyncio.Future[Slot]]] = []
        self._pushed = 0

    def push(self, item: Item, waiting: asyncio.Future[Slot]) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (item.priority, self._pushed, item, waiting))

    def head(self) -> Item | None:
        """Returns the waiting item with the best priority."""
        heap = self._heap
        while heap and heap[0][3].done():  # cancelled, or there twice with another priority
            heapq.heappop(heap)
        if not heap:
            self._held_since = math.inf
        return heap[0][2] if heap else None

    def ready_at(self, item: Item, now: float) -> float:
        """Returns the time from which on pauses and rates allow an item."""
        if not self.rated:
            return self.paused_until
        paces = [pace.ready_at(1) for pace in self._requests] + [pace.ready_at(item.tokens) for pace in self._tokens]
        at = max(paces)
        if at > now >= self.paused_until:
            self._held_since = min(self._held_since, now)
        return max(at, self.paused_until)

    def begin(self, now: float) -> tuple[Item, asyncio.Future[Slot]]:
        """Removes the head and counts it as running."""
        *_, item, waiting = heapq.heappop(self._heap)
        self.running += 1
        for pace in self._requests:
            pace.begin(1, now)
        for pace in self._tokens:
            pace.begin(item.tokens, now)
        self.waited_s += max(0.0, now - self._held_since)
        self._held_since = math.inf
        return item, waiting

    def give_back(self, slot: Slot) -> None:
        """Counts a call as not begun."""
        self.running -= 1
        for pace in self._requests:
            pace.correct(-1)
        for pace in self._tokens:
            pace.correct(-slot.tokens)

    def end(self, slot: Slot, overloaded: bool, failed: bool, more_tokens: int, now: float) -> None:
        """Counts a call as ended, and adapts the limit to how it ended."""
        saturated = self.running >= int(self.limit)
        self.running -= 1
        for pace in self._tokens:
            pace.correct(more_tokens)
        if not self.limits.adaptive:
            return
        before = int(self.limit)
        if overloaded:
            # Calls that were in flight together count once: after a cut only calls begun since then cut again.
            if slot.begun >= self._cut_at:
                self.limit = max(float(self.limits.floor), self.limit * BACK_OFF)
                self._cut_at = now
        elif saturated and not failed:
            self.limit = min(float(self.limits.concurrency), self.limit + 1 / self.limit)
        if int(self.limit) != before:
            self.changes.append((clock.now(), int(self.limit)))


@dataclass(eq=False, slots=True)
class Slot:
    """The right to one call, granted by :meth:`Slots.acquire`."""

    queue: Queue
    tokens: int
    begun: float
    """Time of the loop."""


class Slots:
    """The slots of an agent, on one event loop.

    Args:
        limits: of all calls and of single endpoints.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.running = self.peak = 0
        everything = Queue("", limits)
        named = {name: Queue(name, own, everything.own) for name, own in limits.endpoints.items()}
        self.queues = {"": everything, **named}
        self._local = Queue("", Limits(limits.concurrency))
        """Of what needs a slot but no service: rates, pauses and lowered limits do not apply."""
        self._all = [*self.queues.values(), self._local]
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, item: Item, local: bool = False) -> Slot:
        """Waits for a slot; :meth:`release` must follow.

        Args:
            item: that needs it.
            local: whether it calls no service.
        """
        queue = self._local if local else self._queue_of(item)
        waiting: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        item.waiting = waiting
        queue.push(item, waiting)
        self.fill()
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():  # granted just before
                self.give_back(waiting.result())
            raise
        finally:
            item.waiting = None

    def promote(self, item: Item) -> None:
        """Moves an item that waits to its new, better priority."""
        if item.waiting is not None:
            self._queue_of(item).push(item, item.waiting)
            self.fill()

    def _queue_of(self, item: Item) -> Queue:
        """Returns the queue of an item's endpoint; endpoints without limits of their own share one."""
        return self.queues.get(item.endpoint, self.queues[""])

    def fill(self) -> None:
        """Grants the free slots to the items with the best priority that may begin."""
        now, next_at = _now(), math.inf
        while self.running < self.limits.concurrency:
            best: tuple[tuple[int, int, int], Queue] | None = None
            next_at = math.inf
            for queue in self._all:
                head = queue.head()
                if head is None or queue.running >= int(queue.limit):
                    continue
                ready_at = queue.ready_at(head, now)
                if ready_at > now:
                    next_at = min(next_at, ready_at)
                elif best is None or head.priority < best[0]:
                    best = head.priority, queue
            if best is None:
                break
            queue = best[1]
            item, waiting = queue.begin(now)
            self.running += 1
            self.peak = max(self.peak, self.running)
            item.held_by = self._held_by(queue, now - clock.now() + item.queued_at)
            waiting.set_result(Slot(queue, item.tokens, now))
        self._fill_at(next_at)

    def _fill_at(self, at: float) -> None:
        if self._timer is not None:
            if self._timer.when() == at:
                return
            self._timer.cancel()
        self._timer = None if at == math.inf else asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.fill()

    def _held_by(self, queue: Queue, since: float) -> str:
        """Returns what an item that has just taken its slot has waited for since then."""
        if self.running >= self.limits.concurrency or queue.running >= int(queue.limit):
            return "slot"
        if queue.paused_until > since:
            return "pause"
        return "rate" if queue.rated else ""

    def release(self, slot: Slot, overloaded: bool = False, failed: bool = False, used: int | None = None) -> None:
        """Frees a slot.

        Args:
            slot: of a call that has ended.
            overloaded: whether it ended since the service was overloaded.
            failed: whether it ended with an error.
            used: tokens that it used, if it says so.
        """
        self.running -= 1
        more = 0 if used is None else used - slot.tokens
        slot.queue.end(slot, overloaded, failed, more, _now())
        self.fill()

    def give_back(self, slot: Slot) -> None:
        """Frees a slot for which no call was made."""
        self.running -= 1
        slot.queue.give_back(slot)
        self.fill()

    def pause(self, queue: Queue, seconds: float) -> None:
        """Starts nothing at an endpoint for some seconds, as it asked; those without limits of their own share one."""
        until, last = _now() + seconds, queue.paused_until
        queue.paused_until = max(last, until)
        if seconds > LONG_S and last < _now():  # it looks like a run that stands still
            logger.warning(
                "reward agent: {} asks for a pause of {:.0f} s (Retry-After), in which nothing is sent to it; lower "
                "reward.concurrency, or set reward.rpm.",
                queue.name or "the service",
                seconds,
            )

    def take_changes(self) -> list[tuple[float, str, int]]:
        """Returns (seconds of ``clock.now()``, endpoint, limit) of each change of a limit since the last call."""
        found = sorted((at, name, limit) for name, queue in self.queues.items() for at, limit in queue.changes)
        for queue in self.queues.values():
            queue.changes = []
        return found

    def close(self) -> None:
        """Ends the timer."""
        self._fill_at(math.inf)
