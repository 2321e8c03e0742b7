"""Limits: how many calls may be in flight, and how many requests and tokens may go out a minute.

Whatever waits stands in the line of its endpoint, the oldest step first. A slot that falls free goes to the oldest
of all lines that may go on. Nothing here polls: a line is looked at when something in it, or its limit, changed.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dataflow.errors import ConfigError, nearest
from dataflow.rewards.limits.rates import Rates
from dataflow.system import clock

BACK_OFF = 0.7
"""An adaptive limit is multiplied by this when the service is asked too much."""


@dataclass(frozen=True)
class Limits:
    """What may be asked of a service.

    Attributes:
        concurrency: calls in flight; the ceiling of an adaptive limit.
        rpm: requests that may begin in any 60 seconds; None for no limit.
        tpm: tokens that may be sent for in any 60 seconds; needs a reward object with ``tokens``, or replies
            with a column ``tokens``. None for no limit.
        adaptive: lower the limit on 429 and time-outs, and raise it again by one for each round that goes well.
        floor: where an adaptive limit stops to fall.
        endpoints: limits of single endpoints of a reward object with ``endpoint``, within those of the whole.

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
    """Sees to it that limits of endpoints are for endpoints that the reward object sends to.

    Args:
        reward: says by its method ``endpoint`` where a request goes, and may list all names in ``endpoints``.
        limits: of which each endpoint's would else limit nothing.

    Raises:
        ConfigError: it does not say, or has no such endpoint.
    """
    if limits.endpoints and not callable(getattr(reward, "endpoint", None)):
        first = next(iter(limits.endpoints))
        fix = "give it a method endpoint(**arguments), or limit all calls (reward.concurrency, reward.rpm, reward.tpm)"
        raise ConfigError(f"reward.endpoints={{{first}: ...}}: the reward does not say which endpoint it calls; {fix}.")
    known = getattr(reward, "endpoints", None)
    if not isinstance(known, list | tuple):
        return
    for name in limits.endpoints:
        if name not in known:
            hint = nearest(name, known) or f"; there are {', '.join(map(str, known))}."
            raise ConfigError(f"reward.endpoints={{{name}: ...}}: the reward calls no such endpoint{hint}")


class Waiting(Protocol):
    """What stands in a line: its place (the smallest goes first), and whether it is still wanted."""

    place: tuple[int, int, int]
    endpoint: str
    tokens: int

    @property
    def wanted(self) -> bool: ...


class Permits(Protocol):
    """An endpoint's limits that several agents share: requests wait for it in a line of its making."""

    def line(self, limits: Limits, changed: Callable[[], None], on_bug: Callable[[Exception], None]) -> Line:
        """Returns the line; ``on_bug`` is told when those who wait there would wait in vain."""
        ...


def _rates(limits: Limits) -> tuple[Rates, ...]:
    return () if limits.rpm is None and limits.tpm is None else (Rates(limits.rpm, limits.tpm),)


class Line:
    """One endpoint: those who wait for it, and how many may be in flight there.

    Attributes:
        limit: calls in flight, now; a float, since it rises by fractions.
        running: calls in flight.
        waited_s: how long requests at its head waited for their permit.
        changes: (seconds of ``clock.now()``, limit) since they were last taken out.
    """

    def __init__(
        self,
        name: str,
        limits: Limits,
        permits: Sequence[Rates],
        changed: Callable[[], None],
        on_bug: Callable[[Exception], None],
    ) -> None:
        self.name = name
        self.limits = limits
        self.limit = float(limits.concurrency)
        self.running = 0
        self.waited_s = 0.0
        self.throttled = 0
        self.changes: list[tuple[float, int]] = []
        self._heap: list[tuple[int, int, int, int, Waiting]] = []
        self._sequence = 0
        self._changed = changed
        self._cut_at = 0.0
        self._paused: asyncio.TimerHandle | None = None
        self._permits = permits
        self._permit: int | None = None  # the tokens it is for
        self._wake = asyncio.Event()
        self._on_bug = on_bug
        self._pump = asyncio.get_running_loop().create_task(self._take()) if permits else None

    def push(self, item: Waiting) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (*item.place, self._sequence, item))
        self._wake.set()

    def head(self) -> Waiting | None:
        """Returns who is next, whether it may start or not."""
        heap = self._heap
        while heap and not heap[0][-1].wanted:
            heapq.heappop(heap)
        return heap[0][-1] if heap else None

    def ready(self) -> Waiting | None:
        """Returns who may start now."""
        if self._paused is not None or self.running >= int(self.limit):
            return None
        head = self.head()
        if self._permits and head is not None and not self._permitted(head):
            return None
        return head

    def _permitted(self, head: Waiting) -> bool:
        """Whether the permit at hand is for it: one that came later may stand before the one it was fetched for."""
        if self._permit is not None and head.tokens > self._permit:
            self._drop()
            self._wake.set()
        return self._permit is not None

    def pop(self) -> None:
        """The head starts."""
        item = heapq.heappop(self._heap)[-1]
        self.running += 1
        if self._permits:
            self._permit = None
            for permits in self._permits:
                permits.begin(item.tokens)
            self._wake.set()

    def waiting(self) -> int:
        return sum(entry[-1].wanted for entry in self._heap)

    def pause(self, seconds: float) -> None:
        """Starts nothing for a while, as the server asked."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if self._paused is not None:
            if self._paused.when() >= until:
                return
            self._paused.cancel()
        self._paused = loop.call_at(until, self._go_on)
        self.woken()

    def _go_on(self) -> None:
        self._paused = None
        self._wake.set()
        self._changed()

    def ended(self, begun: float, throttled: bool, extra_tokens: int, error: BaseException | None) -> None:
        """A call has ended.

        Args:
            begun: when, in seconds of ``clock.now()``.
            throttled: whether it ended because the service is asked too much.
            extra_tokens: tokens it used beyond its estimate.
            error: what it ended with.
        """
        saturated = self.running + 1 > int(self.limit)
        self.running -= 1
        self.throttled += throttled
        for permits in self._permits:
            permits.give(extra_tokens, clock.now() - begun)
        if self.limits.adaptive:
            self._adapt(begun, throttled, saturated and error is None)

    def _adapt(self, begun: float, throttled: bool, well: bool) -> None:
        before = int(self.limit)
        if throttled:
            # A whole flight that is turned away is one piece of news: only calls begun since the cut tell more.
            if begun >= self._cut_at:
                self.limit = max(float(self.limits.floor), self.limit * BACK_OFF)
                self._cut_at = clock.now()
        elif well:
            self.limit = min(float(self.limits.concurrency), self.limit + 1 / self.limit)
        if int(self.limit) != before:
            self.changes.append((clock.now(), int(self.limit)))

    async def _take(self) -> None:
        """Keeps one permit at hand while anyone waits."""
        try:
            await self._take_on()
        except Exception as error:
            self._on_bug(error)

    async def _take_on(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._permit is not None or not self._may_start():
                continue
            begin, tokens = time.perf_counter(), self._heap[0][-1].tokens
            for permits in self._permits:
                await permits.take(tokens)
            self.waited_s += time.perf_counter() - begin
            self._permit = tokens
            self.woken()
            self._changed()

    def _may_start(self) -> bool:
        """Whether one could start here if it had a permit, and a slot of the whole."""
        return self._paused is None and self.running < int(self.limit) and self.head() is not None

    def _drop(self) -> None:
        self._permit = None
        for permits in self._permits:
            permits.drop()

    def woken(self) -> None:
        """Something has changed: a permit that cannot be used is left to other lines, or the next one fetched."""
        if self._permit is not None and not self._may_start():
            self._drop()
        elif self._permits:
            self._wake.set()

    def close(self) -> None:
        if self._pump is not None:
            self._pump.cancel()
        if self._paused is not None:
            self._paused.cancel()


class Limiter:
    """All lines of an agent.

    Args:
        limits: of the whole, and of single endpoints.
        start: called with what may start and its line; the slot is taken.
        shared: permits that several agents share, by endpoint; None where the agent is alone.
        on_bug: told of an error that would leave whoever waits in a line waiting for ever.
    """

    def __init__(
        self,
        limits: Limits,
        start: Callable[[Any, Line], None],
        shared: Callable[[str], Permits] | None = None,
        on_bug: Callable[[Exception], None] | None = None,
    ) -> None:
        self.limits = limits
        self._start = start
        self._filling = False
        self.running = 0
        self.peak = 0
        self.lines: dict[str, Line] = {}
        self._on_bug = tell = on_bug or _raise
        whole = _rates(limits)
        for name, own in {"": limits, **limits.endpoints}.items():
            if shared is not None:
                self.lines[name] = shared(name).line(own, self.fill, tell)
            else:
                self.lines[name] = Line(name, own, whole if own is limits else _rates(own) + whole, self.fill, tell)
        self._all = list(self.lines.values())
        self._here: Line | None = None

    def push(self, item: Waiting) -> None:
        """Puts it in line; ``fill`` starts it."""
        self.lines.get(item.endpoint, self.lines[""]).push(item)

    def push_here(self, item: Waiting) -> None:
        """Puts in line what takes a slot, but asks no service: no rate, pause or lowered limit is for it."""
        if self._here is None:
            self._here = Line("", Limits(self.limits.concurrency), (), self.fill, self._on_bug)
            self._all.append(self._here)
        self._here.push(item)

    def fill(self) -> None:
        """Starts the oldest that may start, while there are free slots."""
        if self._filling:
            return  # a start that ends at once comes back here
        self._filling = True
        try:
            while self.running < self.limits.concurrency:
                best: tuple[tuple[int, int, int], Line, Waiting] | None = None
                for line in self._all:
                    item = line.ready()
                    if item is not None and (best is None or item.place < best[0]):
                        best = item.place, line, item
                if best is None:
                    return
                _place, line, item = best
                line.pop()
                self.running += 1
                self.peak = max(self.peak, self.running)
                try:
                    self._start(item, line)
                except Exception as error:
                    self._on_bug(error)
        finally:
            self._filling = False

    def release(
        self,
        line: Line,
        begun: float,
        throttled: bool = False,
        extra_tokens: int = 0,
        error: BaseException | None = None,
    ) -> None:
        """A call has ended: its slot is free."""
        self.running -= 1
        line.ended(begun, throttled, extra_tokens, error)
        for other in self.lines.values():
            other.woken()
        self.fill()

    def full(self, line: Line) -> bool:
        """Whether all slots are taken: whoever took the last one had waited for it, others for their rate."""
        return self.running >= self.limits.concurrency or line.running >= int(line.limit)

    def waiting(self) -> int:
        return sum(line.waiting() for line in self._all)

    def changes(self) -> list[tuple[float, str, int]]:
        """Returns each change of a limit since the last call: seconds of ``clock.now()``, endpoint, limit."""
        found = [(at, line.name, limit) for line in self.lines.values() for at, limit in line.changes]
        for line in self.lines.values():
            line.changes = []
        return sorted(found)

    def close(self) -> None:
        for line in self.lines.values():
            line.close()


def _raise(error: Exception) -> None:
    raise error
