"""Slots: how many reward calls may be in flight, and how fast they may begin.

A free slot goes to the oldest request: training steps by number, then validations. So a straggler holds one slot and
delays nothing else. Nothing polls: what waits is looked at when a request or a limit changes, and at the time at which
a rate or a pause next lets one begin.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

from loguru import logger

from dataflow.errors import ConfigError
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

    Raises:
        ConfigError: a number out of range.
    """

    concurrency: int = 64
    rpm: float | None = None
    tpm: float | None = None
    adaptive: bool = False
    floor: int = 1

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigError(f"reward.concurrency={self.concurrency}; give 1 or more.")
        for name in ("rpm", "tpm"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < math.inf:
                raise ConfigError(f"reward.{name}={rate}; give a number above 0, or null.")
        if not 1 <= self.floor <= self.concurrency:
            raise ConfigError(f"reward.floor={self.floor}; give 1 to reward.concurrency={self.concurrency}.")


class Pace:
    """Spaces what begins evenly, so that no 60 seconds have more than an amount, ``most``.

    A second's share may begin at once. The steady rate is lowered by it, so that no 60 seconds hold more than ``most``.
    A larger amount than that begins when nothing is owed, and holds up the next for longer.
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
    tokens: int = 0
    """Estimate of what a call uses."""
    held_by: str = ""
    """What it waited for last: a free ``slot``, the ``rate``, the end of a ``pause``; "" for nothing."""
    waiting: asyncio.Future[Slot] | None = None


@dataclass(eq=False, slots=True)
class Slot:
    """The right to one call, granted by :meth:`Slots.acquire`."""

    local: bool
    tokens: int
    begun: float
    """Time of the loop."""


_Entry = tuple[tuple[int, int, int], int, Item, "asyncio.Future[Slot]"]


class Slots:
    """The slots of an agent, on one event loop.

    Attributes:
        limit: calls of the service that may be in flight now; a float, since it grows by fractions.
        running: slots in use, at most ``limits.concurrency``.
        peak: the most that were.
        waited_s: seconds for which the next request waited for a rate.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.limit = limits, float(limits.concurrency)
        self.running = self.peak = 0
        self.waited_s = 0.0
        self._calling = 0  # slots in which the service is called
        self._requests = None if limits.rpm is None else Pace(limits.rpm)
        self._tokens = None if limits.tpm is None else Pace(limits.tpm)
        self._heaps: tuple[list[_Entry], list[_Entry]] = ([], [])  # of calls, and of what is local
        self._pushed = 0
        # In seconds of the loop, as all times here but those of changes.
        self._paused_until = self._cut_at = -math.inf
        self._held_since = math.inf
        self._changes: list[tuple[float, int]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def acquire(self, item: Item, local: bool = False) -> Slot:
        """Waits for a slot; :meth:`release` must follow.

        An item that is ``local`` calls no service: rates, pauses and lowered limits do not apply.
        """
        waiting: asyncio.Future[Slot] = asyncio.get_running_loop().create_future()
        item.waiting = waiting
        self._push(item, waiting, local)
        try:
            return await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():  # granted just before
                self.give_back(waiting.result())
            raise
        finally:
            item.waiting = None

    def promote(self, item: Item) -> None:
        """Moves a call that waits to its new, better priority."""
        if item.waiting is not None:
            self._push(item, item.waiting, local=False)

    def _push(self, item: Item, waiting: asyncio.Future[Slot], local: bool) -> None:
        self._pushed += 1
        heapq.heappush(self._heaps[local], (item.priority, self._pushed, item, waiting))
        self.fill()

    def fill(self) -> None:
        """Grants the free slots to the items with the best priority that may begin."""
        now, next_at = asyncio.get_running_loop().time(), math.inf
        while self.running < self.limits.concurrency:
            call, local = map(_head, self._heaps)
            next_at = math.inf
            if call is None:
                self._held_since = math.inf
            elif self._calling >= int(self.limit):
                call = None
            elif (ready_at := self._ready_at(call[2], now)) > now:
                call, next_at = None, ready_at
            chosen = min((entry for entry in (call, local) if entry is not None), default=None)
            if chosen is None:
                break
            self._begin(chosen is local, now)
        self._fill_at(next_at)

    def _ready_at(self, item: Item, now: float) -> float:
        """Returns the time from which on pauses and rates allow a call."""
        at = max((pace.ready_at(amount) for pace, amount in self._paces(item.tokens)), default=-math.inf)
        if at > now >= self._paused_until:
            self._held_since = min(self._held_since, now)
        return max(at, self._paused_until)

    def _paces(self, tokens: float) -> Iterator[tuple[Pace, float]]:
        """Yields each rate, and what a call of so many tokens takes of it."""
        if self._requests is not None:
            yield self._requests, 1
        if self._tokens is not None:
            yield self._tokens, tokens

    def _begin(self, local: bool, now: float) -> None:
        *_, item, waiting = heapq.heappop(self._heaps[local])
        self.running += 1
        self.peak = max(self.peak, self.running)
        if not local:
            self._calling += 1
            for pace, amount in self._paces(item.tokens):
                pace.begin(amount, now)
            self.waited_s += max(0.0, now - self._held_since)
            self._held_since = math.inf
            if self.running >= self.limits.concurrency or self._calling >= int(self.limit):
                item.held_by = "slot"
            elif self._paused_until > now - clock.now() + item.queued_at:
                item.held_by = "pause"
            else:
                item.held_by = "rate" if self._requests or self._tokens else ""
        waiting.set_result(Slot(local, item.tokens, now))

    def _fill_at(self, at: float) -> None:
        if self._timer is not None:
            if self._timer.when() == at:
                return
            self._timer.cancel()
        self._timer = None if at == math.inf else asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.fill()

    def release(self, slot: Slot, overloaded: bool = False, failed: bool = False, used: int | None = None) -> None:
        """Frees the slot of a call that has ended, and adapts the limit to how it ended.

        ``overloaded`` says that the service was; ``used`` is the number of tokens, if it is known.
        """
        saturated = self._calling >= int(self.limit)
        self.running -= 1
        if not slot.local:
            self._calling -= 1
            if self._tokens is not None and used is not None:
                self._tokens.correct(used - slot.tokens)
            if self.limits.adaptive:
                self._adapt(slot, overloaded, raised=saturated and not failed)
        self.fill()

    def _adapt(self, slot: Slot, overloaded: bool, raised: bool) -> None:
        before = int(self.limit)
        # Calls that were in flight together count once: after a cut only calls begun since then cut again.
        if overloaded and slot.begun >= self._cut_at:
            self.limit = max(float(self.limits.floor), self.limit * BACK_OFF)
            self._cut_at = asyncio.get_running_loop().time()
        elif raised and not overloaded:
            self.limit = min(float(self.limits.concurrency), self.limit + 1 / self.limit)
        if int(self.limit) != before:
            self._changes.append((clock.now(), int(self.limit)))

    def give_back(self, slot: Slot) -> None:
        """Frees a slot for which no call was made."""
        self.running -= 1
        if not slot.local:
            self._calling -= 1
            for pace, amount in self._paces(slot.tokens):
                pace.correct(-amount)
        self.fill()

    def pause(self, seconds: float) -> None:
        """Starts no call for some seconds, as the service asked."""
        now = asyncio.get_running_loop().time()
        if seconds > LONG_S and self._paused_until < now:  # it looks like a run that stands still
            logger.warning(
                "reward agent: the service asks for a pause of {:.0f} s (Retry-After), in which nothing is sent to it; "
                "lower reward.concurrency, or set reward.rpm.",
                seconds,
            )
        self._paused_until = max(self._paused_until, now + seconds)

    def take_changes(self) -> list[tuple[float, int]]:
        """Returns (seconds of ``clock.now()``, limit) of each change of the limit since the last call."""
        found, self._changes = self._changes, []
        return found

    def close(self) -> None:
        """Ends the timer."""
        self._fill_at(math.inf)


def _head(heap: list[_Entry]) -> _Entry | None:
    """Returns the entry with the best priority that still waits."""
    while heap and heap[0][3].done():  # cancelled, or there twice with another priority
        heapq.heappop(heap)
    return heap[0] if heap else None
