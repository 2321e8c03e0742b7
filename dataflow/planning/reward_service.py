"""Simulates the reward service as a queue with a fixed number of servers; a group is complete with its last sample.

Older steps are served first, and requests of a step in the order they are submitted. Pure. The requests of a batch are
scheduled together once the first of them begins; those after an event that changes their order are scheduled anew, so
that a later training request still precedes a validation request that has not begun. Memory holds only requests that
have not been collected.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from dataflow.errors import ConfigError, DataflowError
from dataflow.planning.requests.requests import Requests, Sample
from dataflow.planning.requests.schedule import Arrivals, Rate, Schedule, Slots

POLL_S = 1.0
"""Seconds between the published agent's looks for the next step (verl, recipe/async_reward_agent/reward_agent.py)."""


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


class Batch(NamedTuple):
    """The requests of one submission, in the order they are served."""

    order: tuple[int, int]  # lower ones first
    at: float
    key: Hashable
    requests: Requests


@dataclass
class _Waiter:
    waiter: Any
    count: int
    by_index: bool
    groups: Sequence[int] | None

    def wanted(self, of: _Step) -> Sequence[int] | None:
        """The groups that it waits for; None for those that arrive first."""
        if self.groups is not None or not self.by_index:
            return self.groups
        return sorted(of.unclaimed)[: self.count]


@dataclass
class _Step:
    end: dict[int, float] = field(default_factory=dict)  # group of an overtaken batch -> latest end so far
    arrived: dict[int, float] = field(default_factory=dict)  # group -> time, in order of arrival
    delivered: float = -math.inf  # time of the latest delivery
    unclaimed: set[int] = field(default_factory=set)
    waiters: deque[_Waiter] = field(default_factory=deque)
    unseen: bool = False  # what the first waiter waits for may have arrived already

    def arrive(self, group: int, time: float) -> None:
        """Notes that a group arrives; the service looks for its waiter."""
        self.arrived[group] = time
        self.unseen = True


@dataclass
class _Current:
    """The batch that is served.

    Attributes:
        batch: its requests.
        schedule: when they begin and end.
        arrivals: when its groups arrive.
    """

    batch: Batch
    schedule: Schedule
    arrivals: Arrivals

    @property
    def next(self) -> int:
        """The number of the next request to serve."""
        return int(self.arrivals.served)

    @next.setter
    def next(self, number: int) -> None:
        self.arrivals.served = number


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
        self._slots = Slots(servers or 1, Rate(rpm))
        self._key: Hashable = None  # of the batch served last
        self._sequence = 0
        self._incoming: list[tuple[float, int, Batch]] = []
        self._waiting: list[tuple[tuple[int, int], int, Batch]] = []
        self._current: _Current | None = None
        self._steps: dict[Hashable, _Step] = {}
        self._served: list[tuple[float, int, Arrivals]] = []  # heap: batches that are served, by their next arrival
        self._last = (-1, 0.0)  # what made the last delivery: its last request if of the current batch, and its time

    def submit(
        self, key: Hashable, at: float, samples: Requests | Sequence[Sample], order: tuple[int, int] = (0, 0)
    ) -> None:
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
        requests = Requests.of(samples)
        of = self._steps.setdefault(key, _Step())
        of.unclaimed.update(requests.ids.tolist())
        self._register(key, requests)
        if self._unlimited:
            # Each has a slot of its own.
            ends = at + requests.most(requests.seconds)
            self._end_serving(Arrivals(key, requests.ids, ends, requests.first, math.inf))
            self.served += len(requests)
            return
        self._sequence += 1
        batch = Batch((0, 0) if self._per_step else order, at, key, requests)
        heapq.heappush(self._incoming, (at, self._sequence, batch))

    def _register(self, key: Hashable, requests: Requests) -> None:
        """Notes submitted requests, for a subclass that serves them one by one."""

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
        self._steps[key].unseen = True

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
        if (current := self._current) is not None:
            return current.schedule.starts[current.next]
        slots, time = self._slots, self._slots.first
        if not self._waiting:
            if not self._incoming:
                return math.inf
            time = max(time, self._incoming[0][0])
        elif self._per_step and self._waiting[0][-1].key != self._key:
            time = slots.last
        if time >= until:
            return time  # choose none yet: an earlier one may still be submitted
        self._take_in(time)
        batch = heapq.heappop(self._waiting)[-1]
        if self._per_step and batch.key != self._key:
            # All slots start together, once the last request of the step before has ended.
            time = slots.last
            slots.all_free_at(time if batch.at <= time else batch.at + POLL_S / 2)
        self._key = batch.key
        self._current = self._scheduled(batch)
        return self._current.schedule.starts[0]

    def _scheduled(self, batch: Batch) -> _Current:
        """Schedules the requests of a batch as if nothing overtook it."""
        requests, end = batch.requests, self._steps[batch.key].end
        schedule = self._slots.serve(requests.seconds, batch.at)
        ends = requests.most(schedule.ends)
        if end:
            for n, group in enumerate(requests.ids.tolist()):
                ends[n] = max(ends[n], end.pop(group, -math.inf))
        return _Current(batch, schedule, Arrivals(batch.key, requests.ids, ends, requests.last, 0))

    def _end_serving(self, arrivals: Arrivals) -> None:
        """Leaves the groups of a batch to arrive, after all of its requests have begun."""
        self._sequence += 1
        if arrivals.next < math.inf:
            heapq.heappush(self._served, (arrivals.next, self._sequence, arrivals))

    def _take_in(self, time: float) -> None:
        while self._incoming and self._incoming[0][0] <= time:
            batch = heapq.heappop(self._incoming)[-1]
            self._sequence += 1  # by time of arrival, not by order of the calls to submit
            heapq.heappush(self._waiting, (batch.order, self._sequence, batch))

    def _serve(self, start: float, until: float) -> Delivery | None:
        """Serves requests of the current batch until another batch may come between, or to the first delivery."""
        current = self._current
        assert current is not None
        if not self._per_step and self._overtaken(current.batch.order, start):
            self._put_back(current)
            return None
        stop = until if not self._incoming or self._per_step else min(until, self._incoming[0][0])
        begun, starts = current.next, current.schedule.starts
        current.next = bisect_left(starts, stop, begun)
        found = self._arrive(starts[current.next - 1])
        if found is not None:
            # Nothing begins from the arrival on that made the delivery: others may be submitted then.
            last, end = self._last
            current.next = max(last + 1, bisect_left(starts, end, begun + 1, current.next))
        self.served += current.next - begun
        if current.next == len(starts):
            self._current = None
            self._end_serving(current.arrivals)
        return found

    def _overtaken(self, order: tuple[int, int], start: float) -> bool:
        """Whether a batch of higher priority is there when a request of the current batch would start."""
        self._take_in(start)
        return bool(self._waiting) and self._waiting[0][0] < order

    def _put_back(self, current: _Current) -> None:
        """Returns the rest of a batch to the queue."""
        batch, schedule, served = current.batch, current.schedule, current.next
        self._current = None
        self._slots = schedule.undone(served)
        end, unserved = self._steps[batch.key].end, set(current.arrivals.drop_unserved())
        for (group, _seconds), ends in zip(batch.requests.pairs[:served], schedule.ends[:served].tolist(), strict=True):
            if group in unserved:
                end[group] = max(ends, end.get(group, -math.inf))
        self._end_serving(current.arrivals)
        self._wait_again(batch, served)

    def _wait_again(self, batch: Batch, served: int) -> None:
        # 0: before batches of equal priority.
        heapq.heappush(self._waiting, (batch.order, 0, batch._replace(requests=batch.requests.after(served))))

    # --- delivering ---------------------------------------------------------------------------------------

    def _arrive(self, until: float) -> Delivery | None:
        """Notes the groups that arrive by a time; returns the first delivery that one of them makes."""
        served, current = self._served, self._current
        while True:
            next_served, next_current = (
                served[0][0] if served else math.inf,
                current.arrivals.next if current else math.inf,
            )
            if min(next_served, next_current) > until or next_served == next_current == math.inf:
                return None
            # Of groups that arrive at the same time, that which was served first comes first.
            if next_served <= next_current:
                _at, age, first = heapq.heappop(served)
                end = first.until(min(until, next_current))
                if served and served[0][0] <= until:
                    end = min(end, first.until(served[0][0], included=age < served[0][1]))
            else:
                assert current is not None
                first, end = current.arrivals, current.arrivals.until(until)
                if next_served <= until:
                    end = first.until(next_served, included=False)
            of, begin = self._steps[first.key], first.at
            end, enough = self._enough(of, first, end)
            of.arrived.update(zip(first.groups[begin:end], first.ends[begin:end], strict=True))
            first.at = end
            if next_served <= next_current and end < len(first.ends):
                heapq.heappush(served, (first.ends[end], age, first))
            if enough and (found := self._deliver(first.key, of)):
                self._last = (-1 if next_served <= next_current else first.lasts[end - 1], first.ends[end - 1])
                return found

    @staticmethod
    def _enough(of: _Step, arrivals: Arrivals, end: int) -> tuple[int, bool]:
        """Returns up to where groups arrive until the first waiter has what it waits for, and whether it has."""
        begin = arrivals.at
        if not of.waiters:
            return end, False
        waiter = of.waiters[0]
        if (wanted := waiter.wanted(of)) is None:
            enough = begin + max(1, waiter.count - len(of.arrived))
            return min(end, enough), enough <= end
        if len(wanted) < waiter.count:
            return end, False
        missing = set(wanted).difference(of.arrived)
        for n in range(begin, end):
            missing.discard(arrivals.groups[n])
            if not missing:
                return n + 1, True
        return end, False

    def _deliver_arrived(self) -> Delivery | None:
        """Returns a delivery of groups that arrived before their waiter was at the head of its queue."""
        for key, of in self._steps.items():
            if of.unseen:
                of.unseen = False
                if of.waiters and (found := self._deliver(key, of)):
                    return found
        return None

    def _deliver(self, key: Hashable, of: _Step) -> Delivery | None:
        waiter = of.waiters[0]
        if (wanted := waiter.wanted(of)) is not None:
            if len(wanted) < waiter.count or not of.arrived.keys() >= set(wanted):
                return None
            groups = tuple(wanted)
        elif len(of.arrived) < waiter.count:
            return None
        else:
            groups = tuple(islice(of.arrived, waiter.count))
        of.waiters.popleft()
        of.unseen = True
        of.delivered = max([of.delivered, *map(of.arrived.pop, groups)])
        of.unclaimed.difference_update(groups)
        if not of.unclaimed and not of.waiters:
            del self._steps[key]
        return Delivery(of.delivered, waiter.waiter, groups)
