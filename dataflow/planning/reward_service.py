"""Simulates the reward service as a queue with a fixed number of servers; a group is complete with its last sample.

Older steps are served first, and requests of a step in the order they are submitted. One loop gives each request the
server that is free first, and stops where something may change the order: at a submission, at a delivery, which may
lead to further requests, and at the time that the caller gives. Pure.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import insort
from collections import deque
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

POLL_S = 1.0
"""Seconds between the published agent's looks for the next step (verl, recipe/async_reward_agent/reward_agent.py)."""

Due: TypeAlias = tuple[float, int]
"""When a group or a delivery is there, in seconds, and the number of its last request, which decides between equals."""
Places: TypeAlias = Mapping[int, tuple[int, Sequence[int]]]
"""Place of a group's last request -> (the group, the places of all its requests), in order."""

_NEVER: Due = (math.inf, 0)


def places_of(groups: Iterable[int]) -> Places:
    """Returns where the requests of each group are, given the group of each request in the order they are sent."""
    found: dict[int, list[int]] = {}
    for place, group in enumerate(groups):
        found.setdefault(group, []).append(place)
    return dict(sorted((places[-1], (group, places)) for group, places in found.items()))


class Requests(NamedTuple):
    """Requests in the order they are sent; a group's need not be adjacent. For ``places`` see :func:`places_of`."""

    seconds: Sequence[float]
    places: Places


class Delivery(NamedTuple):
    """Groups delivered to a waiter, in the order of their arrival or as the waiter named them."""

    at: float
    waiter: Any
    groups: tuple[int, ...]


@dataclass
class _Batch:
    """The requests of one submission, and when those that have begun end."""

    key: Hashable
    at: float
    order: tuple[int, int]
    requests: Requests
    ends: list[float] = field(default_factory=list)


@dataclass
class _Step:
    """The groups of a key that were not delivered, and those who wait for them."""

    left: int = 0  # groups with requests that have not begun
    ready: list[tuple[float, int, int]] = field(default_factory=list)  # (*due, group) of the others, in order
    waiters: deque[tuple[Any, int | Sequence[int]]] = field(default_factory=deque)
    missing: set[int] = field(default_factory=set)  # groups that the first waiter names, and that are not ready
    delivered: float = -math.inf
    due: Due = _NEVER  # when the first waiter has what it waits for

    def look(self) -> None:
        """Finds out anew when the first waiter has what it waits for."""
        self.due, self.missing = _NEVER, set()
        if not self.waiters:
            return
        _waiter, wanted = self.waiters[0]
        if isinstance(wanted, int):
            self.due = self.ready[wanted - 1][:2] if len(self.ready) >= wanted else _NEVER
            return
        due = {group: (at, number) for at, number, group in self.ready}
        self.missing = set(wanted).difference(due)
        if not self.missing:
            self.due = max(due[group] for group in wanted)

    def add(self, group: int, at: float, number: int) -> None:
        """Notes when a group arrives, as the last of its requests begins, which is the ``number``-th."""
        self.left -= 1
        insort(self.ready, (at, number, group))
        wanted = self.waiters[0][1] if self.waiters else None
        if isinstance(wanted, int):
            if len(self.ready) >= wanted:
                self.due = self.ready[wanted - 1][:2]
        elif wanted is not None:
            self.missing.discard(group)
            if not self.missing:
                self.look()

    def deliver(self) -> Delivery:
        """Takes out the groups of the first waiter."""
        waiter, wanted = self.waiters.popleft()
        taken = [group for *_due, group in self.ready[:wanted]] if isinstance(wanted, int) else list(wanted)
        gone = set(taken)
        self.ready = [each for each in self.ready if each[-1] not in gone]
        self.delivered = max(self.delivered, self.due[0])
        self.look()
        return Delivery(self.delivered, waiter, tuple(taken))


class RewardService:
    """Serves requests and delivers complete groups.

    Args:
        servers: requests in flight at most; None for no limit, neither of them nor of their rate.
        rpm: requests started per minute at most, spread evenly with bursts of at most one second's worth, as the agent
            sends them. None for no limit.
        per_step: serve each key only after all requests of the one before have ended, and look for a new key every
            :data:`POLL_S`, as the published agent does.
    """

    def __init__(self, servers: int | None, rpm: float | None = None, per_step: bool = False) -> None:
        self._per_step = per_step
        self._unlimited = servers is None
        self._free = [0.0] * (servers or 1)  # heap: when each server is free
        # The next request begins at ``_even - _burst`` at the earliest; ``_even`` is when it would at an even rate.
        self._apart = 60.0 / rpm if rpm else 0.0
        self._burst = max(0.0, 1.0 - self._apart)
        self._even = 0.0
        self._key: Hashable = None  # of the batch served last
        self._sequence = itertools.count(1)
        self._incoming: list[tuple[float, int, _Batch]] = []  # heap, by time
        self._waiting: list[tuple[tuple[int, int], int, _Batch]] = []  # heap, by priority
        self._steps: dict[Hashable, _Step] = {}

    def submit(self, key: Hashable, at: float, requests: Requests, order: tuple[int, int] = (0, 0)) -> None:
        """Submits requests, to be served as listed; a key may be submitted again, with different groups each time.

        The lowest ``order`` is served first, equal ones in order of submission; ``per_step`` ignores it.
        """
        of = self._steps.setdefault(key, _Step())
        of.left += len(requests.places)
        if self._unlimited:
            for group, places in requests.places.values():
                of.add(group, at + max(requests.seconds[place] for place in places), next(self._sequence))
            return
        batch = _Batch(key, at, (0, 0) if self._per_step else order, requests)
        heapq.heappush(self._incoming, (at, next(self._sequence), batch))

    def wait(self, key: Hashable, waiter: Any, groups: int | Sequence[int]) -> None:
        """Registers a waiter for groups of a key that was submitted; :meth:`advance` returns them once complete.

        ``groups`` is how many, of those that arrive first; or which, whatever the others do. Waiters of the same key
        are served in the order they were registered.
        """
        of = self._steps[key]
        of.waiters.append((waiter, groups))
        if len(of.waiters) == 1:
            of.look()

    def advance(self, until: float) -> Delivery | None:
        """Serves requests up to a time or to the first delivery; returns the delivery, or None.

        Requests that could begin exactly at ``until`` are left, as others submitted for that time may precede them.
        """
        due = min((of.due[0] for of in self._steps.values()), default=math.inf)
        while (batch := self._next_batch(stop := min(until, due))) is not None:
            if self._incoming and not self._per_step:
                stop = min(stop, self._incoming[0][0])  # what comes then may overtake the rest
            due = min(due, self._begin(batch, stop))
            if len(batch.ends) == len(batch.requests.seconds):
                heapq.heappop(self._waiting)
        key = min(self._steps, key=lambda key: self._steps[key].due, default=None)
        if key is None or (of := self._steps[key]).due > (until, math.inf) or of.due == _NEVER:
            return None
        found = of.deliver()
        if not (of.left or of.ready or of.waiters):
            del self._steps[key]
        return found

    def _next_batch(self, stop: float) -> _Batch | None:
        """Returns the batch of the next request to begin; None if that is not before ``stop``."""
        if not (self._waiting or self._incoming):
            return None
        time = max(self._free[0], self._waiting[0][-1].at if self._waiting else self._incoming[0][0])
        if self._waiting and self._per_step and self._waiting[0][-1].key != self._key:
            time = max(self._free)
        time = max(time, self._even - self._burst)
        if time >= stop:
            return None  # an earlier one may still be submitted
        while self._incoming and self._incoming[0][0] <= time:
            _at, _number, batch = heapq.heappop(self._incoming)
            heapq.heappush(self._waiting, (batch.order, next(self._sequence), batch))  # by time
        batch = self._waiting[0][-1]
        if self._per_step and batch.key != self._key:
            # All servers start together, once the last request of the step before has ended.
            idle = max(self._free)
            self._free = [idle if batch.at <= idle else batch.at + POLL_S / 2] * len(self._free)
        self._key = batch.key
        return batch

    def _begin(self, batch: _Batch, stop: float) -> float:
        """Begins requests of a batch until another one may come between, at ``stop`` or at a delivery.

        Returns when the first waiter of the batch's key has what it waits for, as far as that is known.
        """
        of, free, at, ends, apart = self._steps[batch.key], self._free, batch.at, batch.ends, self._apart
        seconds, places = batch.requests
        for number in range(len(ends), len(seconds)):
            start = free[0] if free[0] > at else at
            if apart:
                start = max(start, self._even - self._burst)
            if start >= stop:
                break
            end = start + seconds[number]
            heapq.heapreplace(free, end)
            ends.append(end)
            if apart:
                self._even = max(self._even, start) + apart
            if number in places:
                group, own = places[number]
                of.add(group, max(map(ends.__getitem__, own)), next(self._sequence))
                if of.due[0] < stop:
                    stop = of.due[0]
        return of.due[0]
