"""Simulates the reward service as a queue with a fixed number of servers; a group is complete with its last sample.

Older steps are served first, and requests of a step in the order they are submitted. One loop gives each request the
server that is free first, and stops where something may change the order: at a submission, at a delivery, which may
lead to further requests, and at the time that the caller gives. Pure.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heapreplace
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

from dataflow.errors import ConfigError, DataflowError

POLL_S = 1.0
"""Seconds between the published agent's looks for the next step (verl, recipe/async_reward_agent/reward_agent.py)."""

Sample: TypeAlias = tuple[int, float]
"""(group, seconds) of one request."""
Due: TypeAlias = tuple[float, int]
"""When a group or a delivery is there, in seconds, and the number of its last request, which decides between equals."""

_NEVER: Due = (math.inf, 0)


class Delivery(NamedTuple):
    """Groups delivered to a waiter.

    Attributes:
        at: time of delivery, in seconds.
        waiter: the value given to :meth:`RewardService.wait`.
        groups: the groups, in the order of their arrival.
    """

    at: float
    waiter: Any
    groups: tuple[int, ...]


@dataclass
class _Batch:
    """The requests of one submission, of which the first ``begun`` have begun."""

    key: Hashable
    at: float
    order: tuple[int, int]
    samples: Sequence[Sample]
    begun: int = 0


@dataclass(frozen=True)
class _Waiter:
    waiter: Any
    count: int
    by_index: bool
    groups: Sequence[int] | None


@dataclass
class _Step:
    """The groups of a key that were not delivered, and those who wait for them."""

    left: dict[int, list[Any]] = field(default_factory=dict)  # group -> requests not begun, latest end of the others
    ready: list[tuple[float, int, int]] = field(default_factory=list)  # (*due, group) of those that arrive, in order
    waiters: deque[_Waiter] = field(default_factory=deque)
    missing: set[int] = field(default_factory=set)  # groups that the first waiter names, and that are not ready
    delivered: float = -math.inf
    due: Due = _NEVER

    @property
    def wanted(self) -> list[int] | None:
        """The groups that the first waiter names; None if it takes those that arrive first."""
        first = self.waiters[0]
        if first.groups is not None or not first.by_index:
            return None if first.groups is None else list(first.groups)
        return sorted([*self.left, *(group for *_due, group in self.ready)])[: first.count]

    def look(self) -> None:
        """Finds out anew when the first waiter has what it waits for."""
        self.due = _NEVER
        if not self.waiters:
            return
        if (wanted := self.wanted) is None:
            self._look_at_first()
        elif len(wanted) >= self.waiters[0].count:
            due = {group: (at, number) for at, number, group in self.ready}
            self.missing = set(wanted).difference(due)
            if not self.missing:
                self.due = max(due[group] for group in wanted)

    def _look_at_first(self) -> None:
        count = self.waiters[0].count
        self.due = self.ready[count - 1][:2] if len(self.ready) >= count else _NEVER

    def add(self, group: int, at: float, number: int) -> None:
        """Notes when a group arrives, as the last of its requests begins, which is the ``number``-th."""
        insort(self.ready, (at, number, group))
        if not self.waiters:
            return
        if self.waiters[0].groups is None and not self.waiters[0].by_index:
            self._look_at_first()
        elif group in self.missing:
            self.missing.discard(group)
            if not self.missing:
                self.look()

    def deliver(self) -> Delivery:
        """Takes out the groups of the first waiter."""
        wanted = self.wanted
        if wanted is None:
            wanted = [group for *_due, group in islice(self.ready, self.waiters[0].count)]
        taken = set(wanted)
        self.ready = [each for each in self.ready if each[-1] not in taken]
        self.delivered = max(self.delivered, self.due[0])
        found = Delivery(self.delivered, self.waiters.popleft().waiter, tuple(wanted))
        self.look()
        return found


class RewardService:
    """Serves requests and delivers complete groups.

    Args:
        servers: requests in flight at most; None for no limit.
        rpm: requests started per minute at most, spread evenly with bursts of at most one second's worth, as the agent
            sends them. None for no limit.
        per_step: serve each key only after all requests of the one before have ended, and look for a new key every
            :data:`POLL_S`, as the published agent does.

    Attributes:
        served: number of requests begun.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(self, servers: int | None, rpm: float | None = None, per_step: bool = False) -> None:
        if servers is not None and servers < 1:
            raise ConfigError(f"reward.concurrency={servers}; give 1 request in flight or more.")
        if rpm is not None and not rpm > 0:
            raise ConfigError(f"reward.rpm={rpm:g}; give more than 0 requests per minute, or leave it out.")
        self.served = 0
        self._per_step = per_step
        self._unlimited = servers is None
        self._free = [0.0] * (servers or 1)  # heap: when each server is free
        # A bucket of tokens, one a request.
        self._rate = rpm / 60.0 if rpm and rpm < math.inf else 0.0
        self._tokens = self._bucket = max(1.0, self._rate)
        self._filled = 0.0
        self._key: Hashable = None  # of the batch served last
        self._sequence = 0
        self._incoming: list[tuple[float, int, _Batch]] = []  # heap, by time
        self._waiting: list[tuple[tuple[int, int], int, _Batch]] = []  # heap, by priority
        self._steps: dict[Hashable, _Step] = {}

    def submit(self, key: Hashable, at: float, samples: Sequence[Sample], order: tuple[int, int] = (0, 0)) -> None:
        """Submits requests. A key may be submitted several times, with different groups each time.

        Args:
            key: key to collect them by.
            at: time of submission, in seconds.
            samples: requests in the order to serve them; samples of a group need not be adjacent.
            order: priority, lowest first; requests of equal priority are served in order of submission. Ignored with
                ``per_step``.
        """
        if not samples:
            return
        of = self._steps.setdefault(key, _Step())
        counts = Counter(map(itemgetter(0), samples))
        of.left.update({group: [count, at] for group, count in counts.items()})
        of.look()
        batch = _Batch(key, at, (0, 0) if self._per_step else order, samples)
        if self._unlimited:
            self._begin(batch, math.inf)
        else:
            heapq.heappush(self._incoming, (at, self._next(), batch))

    def wait(
        self, key: Hashable, waiter: Any, count: int, by_index: bool = False, groups: Sequence[int] | None = None
    ) -> None:
        """Registers a waiter for the next ``count`` groups of a key; :meth:`advance` returns them once complete.

        Args:
            key: as submitted; waiters of the same key are served in the order they were registered.
            waiter: returned with the groups.
            count: number of groups.
            by_index: deliver groups in the order of their numbers instead of their arrival.
            groups: deliver these, whatever the others do.

        Raises:
            DataflowError: the key was never submitted.
        """
        if key not in self._steps:
            raise DataflowError(f"reward service: '{key}' was never submitted.")
        of = self._steps[key]
        of.waiters.append(_Waiter(waiter, count, by_index, groups))
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
            if batch.begun == len(batch.samples):
                heapq.heappop(self._waiting)
        key = min(self._steps, key=lambda key: self._steps[key].due, default=None)
        if key is None or (of := self._steps[key]).due > (until, math.inf) or of.due == _NEVER:
            return None
        found = of.deliver()
        if not (of.left or of.ready or of.waiters):
            del self._steps[key]
        return found

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

    def _next_batch(self, stop: float) -> _Batch | None:
        """Returns the batch of the next request to begin; None if that is not before ``stop``."""
        if not (self._waiting or self._incoming):
            return None
        time = max(self._free[0], self._waiting[0][-1].at if self._waiting else self._incoming[0][0])
        if self._waiting and self._per_step and self._waiting[0][-1].key != self._key:
            time = max(self._free)
        time = self._earliest(time)
        if time >= stop:
            return None  # an earlier one may still be submitted
        while self._incoming and self._incoming[0][0] <= time:
            _at, _number, batch = heapq.heappop(self._incoming)
            heapq.heappush(self._waiting, (batch.order, self._next(), batch))  # by time, not by order of submission
        batch = self._waiting[0][-1]
        if self._per_step and batch.key != self._key:
            # All servers start together, once the last request of the step before has ended.
            idle = max(self._free)
            self._free = [idle if batch.at <= idle else batch.at + POLL_S / 2] * len(self._free)
        self._key = batch.key
        return batch

    def _begin(self, batch: _Batch, stop: float) -> float:
        """Begins requests of a batch until another one may come between.

        Args:
            batch: the requests.
            stop: when no more may begin.

        Returns:
            When the first waiter of the batch's key has what it waits for, as far as that is known.
        """
        of, free, at = self._steps[batch.key], self._free, batch.at
        left, unlimited = of.left, self._unlimited
        plain, number = not (unlimited or self._rate), batch.begun
        for group, seconds in islice(batch.samples, number, None):
            start = free[0]
            if start < at or unlimited:
                start = at
            if not plain and not unlimited:
                start = self._earliest(start)
            if start >= stop:
                break
            number += 1
            end = start + seconds
            if plain:
                heapreplace(free, end)
            elif not unlimited:
                heapreplace(free, end)
                self._tokens = min(self._bucket, self._tokens + (start - self._filled) * self._rate) - 1.0
                self._filled = start
            own = left[group]
            own[0] -= 1
            if end > own[1]:
                own[1] = end
            if not own[0]:
                del left[group]
                of.add(group, own[1], self._next())
                if of.due[0] < stop and not unlimited:
                    stop = of.due[0]
        self.served += number - batch.begun
        batch.begun = number
        return of.due[0]

    def _earliest(self, time: float) -> float:
        """Returns when the limit of requests a minute lets the next request begin, at ``time`` or later."""
        return (
            max(time, self._filled + (1.0 - self._tokens) / self._rate) if self._rate and self._tokens < 1.0 else time
        )
