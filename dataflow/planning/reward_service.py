"""Simulates the reward service as a queue with a fixed number of servers; a group is complete with its last sample.

Older steps are served first, and requests of a step in the order they are submitted. Pure and lazy: :meth:`advance`
serves no further than needed, so that a later training request still precedes a validation request that has not begun,
and memory holds only requests that have not been collected.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, NamedTuple

from dataflow.errors import ConfigError, DataflowError

POLL_S = 1.0
"""Seconds between the published agent's looks for the next step (verl, recipe/async_reward_agent/reward_agent.py)."""

Sample = tuple[int, float]
"""(group, seconds) of one request."""


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


class _Batch(NamedTuple):
    """The requests of one submission, in the order they are served."""

    order: tuple[int, int]  # lower ones first
    at: float
    key: Hashable
    samples: Sequence[Sample]


@dataclass
class _Waiter:
    waiter: Any
    count: int
    by_index: bool
    groups: Sequence[int] | None


@dataclass
class _Step:
    left: dict[int, int] = field(default_factory=dict)  # group -> samples not yet served
    end: dict[int, float] = field(default_factory=dict)  # group -> latest end of its samples so far
    arrived: dict[int, float] = field(default_factory=dict)  # group -> time, in order of arrival
    delivered: float = -math.inf  # time of the latest delivery
    unclaimed: set[int] = field(default_factory=set)
    waiters: deque[_Waiter] = field(default_factory=deque)


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
        busy_s: seconds of service that they take in total.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(self, servers: int | None, rpm: float | None = None, per_step: bool = False) -> None:
        if servers is not None and servers < 1:
            raise ConfigError(f"reward.concurrency={servers}; give 1 request in flight or more.")
        if rpm is not None and not rpm > 0:
            raise ConfigError(f"reward.rpm={rpm:g}; give more than 0 requests per minute, or leave it out.")
        self.served = 0
        self.busy_s = 0.0
        self._per_step = per_step
        self._unlimited = servers is None
        self._free = [0.0] * (servers or 1)  # heap of the times at which servers become free
        self._key: Hashable = None  # of the batch served last
        self._rate = math.inf if rpm is None else rpm / 60.0
        self._bucket = math.inf if rpm is None else max(1.0, self._rate)
        self._tokens, self._filled = self._bucket, 0.0
        self._sequence = 0
        self._incoming: list[tuple[float, int, _Batch]] = []
        self._waiting: list[tuple[tuple[int, int], int, _Batch]] = []
        self._current: _Batch | None = None
        self._next = 0  # sample of the current batch
        self._steps: dict[Hashable, _Step] = {}
        self._finishing: list[tuple[float, int, Hashable, int]] = []

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
        of.left.update(Counter(map(itemgetter(0), samples)))
        of.unclaimed.update(of.left)
        if self._unlimited:
            self._serve_at_once(key, of, at, samples)
            return
        self._sequence += 1
        batch = _Batch((0, 0) if self._per_step else order, at, key, samples)
        heapq.heappush(self._incoming, (at, self._sequence, batch))

    def wait(
        self,
        key: Hashable,
        waiter: Any,
        count: int,
        by_index: bool = False,
        groups: Sequence[int] | None = None,
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
        self._steps[key].waiters.append(_Waiter(waiter, count, by_index, groups))

    def advance(self, until: float) -> Delivery | None:
        """Serves requests up to a time or to the first delivery; returns the delivery, or None.

        Requests that could begin exactly at ``until`` are left, as others submitted for that time may precede them.
        """
        if found := self._deliver_arrived():
            return found
        while True:
            start = self._next_start(until)
            if found := self._arrive(min(start, until)):
                return found
            if start >= until or start == math.inf:
                return None
            if found := self._serve(start, until):
                return found

    # --- serving ------------------------------------------------------------------------------------------

    def _next_start(self, until: float) -> float:
        """Returns when the next request can start; if that is before ``until``, chooses the batch it belongs to."""
        time = self._free[0]
        if self._current is None:
            if not self._waiting:
                if not self._incoming:
                    return math.inf
                time = max(time, self._incoming[0][0])
            elif self._per_step and self._waiting[0][-1].key != self._key:
                time = max(self._free)
            if time >= until:
                return time  # choose none yet: an earlier one may still be submitted
            self._take_in(time)
            self._current, self._next = heapq.heappop(self._waiting)[-1], 0
            if self._per_step and self._current.key != self._key:
                # All servers start together, once the last request of the step before has ended.
                time = max(self._free)
                came = self._current.at
                time = time if came <= time else came + POLL_S / 2
                self._free = [time] * len(self._free)
            self._key = self._current.key
        time = max(time, self._current.at)  # idle servers were free before it was submitted
        if self._tokens < 1.0:
            time = max(time, self._filled + (1.0 - self._tokens) / self._rate)
        return time

    def _take_in(self, time: float) -> None:
        while self._incoming and self._incoming[0][0] <= time:
            batch = heapq.heappop(self._incoming)[-1]
            self._sequence += 1  # by time of arrival, not by order of the calls to submit
            heapq.heappush(self._waiting, (batch.order, self._sequence, batch))

    def _serve_at_once(self, key: Hashable, of: _Step, at: float, samples: Sequence[Sample]) -> None:
        """Serves all samples at once, each by its own server."""
        ends: dict[int, float] = {}
        for group, seconds in samples:
            self.busy_s += seconds
            ends[group] = max(ends.get(group, 0.0), seconds)
        self.served += len(samples)
        for group, seconds in ends.items():
            self._sequence += 1
            heapq.heappush(self._finishing, (at + seconds, self._sequence, key, group))
        of.left.clear()

    def _serve(self, start: float, until: float) -> Delivery | None:
        """Serves requests of the current batch until another batch may come between, or to the first delivery."""
        batch = self._current
        assert batch is not None
        if not self._per_step and self._overtaken(batch, start):
            return None
        of = self._steps[batch.key]
        free, left, ends, samples = self._free, of.left, of.end, batch.samples
        stop = until if not self._incoming or self._per_step else min(until, self._incoming[0][0])
        limited = self._rate != math.inf
        n, most, at, busy = self._next, len(samples), batch.at, self.busy_s
        finishing, replace, push, never = self._finishing, heapq.heapreplace, heapq.heappush, -math.inf
        arrival = finishing[0][0] if finishing else math.inf
        found = None
        while True:
            group, seconds = samples[n]
            end = start + seconds
            replace(free, end)
            busy += seconds
            if limited:
                self._tokens = min(self._bucket, self._tokens + (start - self._filled) * self._rate) - 1.0
                self._filled = start
            if end > ends.get(group, never):
                ends[group] = end
            n += 1
            if left[group] > 1:
                left[group] -= 1
            else:
                self._sequence += 1
                push(finishing, (ends.pop(group), self._sequence, batch.key, group))
                del left[group]
                arrival = finishing[0][0]
            if n == most:
                break
            start = free[0]
            if start < at:
                start = at
            if self._tokens < 1.0:
                start = max(start, self._filled + (1.0 - self._tokens) / self._rate)
            if start >= stop:
                break
            if arrival <= start:
                if found := self._arrive(start):
                    break
                arrival = finishing[0][0] if finishing else math.inf
        self.busy_s = busy
        self.served += n - self._next
        self._next = n
        if n == most:
            self._current = None
        return found

    def _overtaken(self, batch: _Batch, start: float) -> bool:
        """Returns the rest of the current batch to the queue if a batch of higher priority arrived; True if so."""
        self._take_in(start)
        if not self._waiting or self._waiting[0][0] >= batch.order:
            return False
        rest = batch._replace(samples=batch.samples[self._next :])
        heapq.heappush(self._waiting, (batch.order, 0, rest))  # 0: before batches of equal priority
        self._current = None
        return True

    # --- delivering ---------------------------------------------------------------------------------------

    def _arrive(self, until: float) -> Delivery | None:
        """Notes the groups that are complete by a time; returns the first delivery that one of them makes."""
        finishing, steps = self._finishing, self._steps
        while finishing and finishing[0][0] <= until:
            end, _number, key, group = heapq.heappop(finishing)
            of = steps[key]
            of.arrived[group] = end
            if of.waiters and (found := self._deliver(key, of)):
                return found
        return None

    def _deliver_arrived(self) -> Delivery | None:
        """Returns a delivery of groups that were complete before their waiter was at the head of its queue."""
        for key, of in self._steps.items():
            if of.waiters and (found := self._deliver(key, of)):
                return found
        return None

    def _deliver(self, key: Hashable, of: _Step) -> Delivery | None:
        waiter = of.waiters[0]
        if waiter.by_index or waiter.groups is not None:
            wanted = sorted(of.unclaimed)[: waiter.count] if waiter.groups is None else list(waiter.groups)
            if len(wanted) < waiter.count or not of.arrived.keys() >= set(wanted):
                return None
            groups = tuple(wanted)
        elif len(of.arrived) < waiter.count:
            return None
        else:
            groups = tuple(islice(of.arrived, waiter.count))
        of.waiters.popleft()
        of.delivered = max([of.delivered, *(of.arrived.pop(group) for group in groups)])
        of.unclaimed.difference_update(groups)
        if not of.unclaimed and not of.waiters:
            del self._steps[key]
        return Delivery(of.delivered, waiter.waiter, groups)
