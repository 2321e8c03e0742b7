"""The reward service as a queue: c servers, first come first served by step, groups whole with their last sample.

Pure and lazy: nothing is served further than somebody looks. So a training request that comes later still goes before
a validation request that has not begun, and memory holds only what has been asked for and not yet collected.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from dataflow.errors import ConfigError, DataflowError

POLL_S = 1.0
"""The published agent looks for the next step so often (verl, recipe/async_reward_agent/reward_agent.py)."""

Sample = tuple[int, float]
"""(group, seconds) of one request."""


class Delivery(NamedTuple):
    """What a waiter waited for: when it was there, who waited, and the groups in order of their arrival."""

    at: float
    who: Any
    groups: tuple[int, ...]


class _Batch(NamedTuple):
    """What was submitted at once, in the order in which it is served."""

    order: tuple[int, int]  # lower ones first
    at: float
    key: Hashable
    samples: Sequence[Sample]


@dataclass
class _Waiter:
    who: Any
    count: int
    by_index: bool


@dataclass
class _Step:
    left: dict[int, int] = field(default_factory=dict)  # group -> samples that have no server yet
    end: dict[int, float] = field(default_factory=dict)  # group -> latest end of its samples so far
    arrived: dict[int, float] = field(default_factory=dict)  # group -> when, in order of arrival
    delivered: float = -math.inf  # when the last waiter had its groups
    unclaimed: set[int] = field(default_factory=set)
    waiters: deque[_Waiter] = field(default_factory=deque)


class RewardService:
    """Requests in, whole groups out.

    Args:
        servers: requests in flight at most; None for as many as come.
        rpm: requests that start in a minute at most, evenly, as the agent sends them: a second's worth at once. None
            for no limit.
        per_step: each key is served after the one before has ended, to its last request; the service looks for a
            new one every :data:`POLL_S`. So the published agent behaves.

    Attributes:
        served: requests begun.
        busy_s: seconds of service that they take.

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
        self._free = [0.0] * (servers or 1)  # when each server is free next: a heap
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
        """Hands in requests. A key may be handed in several times, with other groups each time.

        Args:
            key: by which they are collected.
            at: when, in seconds.
            samples: in the order in which they are to be served, the same group's not necessarily side by side.
            order: what is lower is served first, whenever it came; of equals the first to come. A service that goes
                step by step serves what came first.
        """
        if not samples:
            return
        of = self._steps.setdefault(key, _Step())
        for group, _seconds in samples:
            of.left[group] = of.left.get(group, 0) + 1
        of.unclaimed.update(of.left)
        if self._unlimited:
            self._serve_at_once(key, of, at, samples)
            return
        self._sequence += 1
        batch = _Batch((0, 0) if self._per_step else order, at, key, samples)
        heapq.heappush(self._incoming, (at, self._sequence, batch))

    def wait(self, key: Hashable, who: Any, count: int, by_index: bool = False) -> None:
        """Waits for the next ``count`` groups of a key; :meth:`advance` says when they are there.

        Args:
            key: as submitted; those who wait for the same are served in the order in which they came.
            who: comes back with the groups.
            count: of groups.
            by_index: the next groups by their number, not the first to arrive.

        Raises:
            DataflowError: nothing of that key was submitted.
        """
        if key not in self._steps:
            raise DataflowError(f"reward service: '{key}' was never submitted.")
        self._steps[key].waiters.append(_Waiter(who, count, by_index))

    def advance(self, until: float) -> Delivery | None:
        """Serves on, up to a time or to the first delivery that somebody waits for.

        What could begin just at ``until`` has not begun: what is still submitted for that time may go before it.
        """
        if found := self._deliver_arrived():
            return found
        while True:
            start = self._next_start(until)
            horizon = min(start, until)
            while self._finishing and self._finishing[0][0] <= horizon:
                end, _number, key, group = heapq.heappop(self._finishing)
                of = self._steps[key]
                of.arrived[group] = end
                if of.waiters and (found := self._deliver(key, of)):
                    return found
            if start >= until or start == math.inf:
                return None
            self._serve(start, until)

    # --- serving ------------------------------------------------------------------------------------------

    def _next_start(self, until: float) -> float:
        """When the next request can start; it is the current batch's, from then on, if that is before ``until``."""
        time = self._free[0]
        if self._current is None:
            if not self._waiting:
                if not self._incoming:
                    return math.inf
                time = max(time, self._incoming[0][0])
            elif self._per_step and self._waiting[0][-1].key != self._key:
                time = max(self._free)
            if time >= until:
                return time  # none is chosen yet: another may still come before
            self._take_in(time)
            self._current, self._next = heapq.heappop(self._waiting)[-1], 0
            if self._per_step and self._current.key != self._key:
                # Step by step: all servers start together, when the last step's last request is done.
                time = max(self._free)
                came = self._current.at
                time = time if came <= time else came + POLL_S / 2
                self._free = [time] * len(self._free)
            self._key = self._current.key
        time = max(time, self._current.at)  # idle servers were free before it came
        if self._tokens < 1.0:
            time = max(time, self._filled + (1.0 - self._tokens) / self._rate)
        return time

    def _take_in(self, time: float) -> None:
        while self._incoming and self._incoming[0][0] <= time:
            batch = heapq.heappop(self._incoming)[-1]
            self._sequence += 1  # in the order in which they come, not that in which they were submitted
            heapq.heappush(self._waiting, (batch.order, self._sequence, batch))

    def _serve_at_once(self, key: Hashable, of: _Step, at: float, samples: Sequence[Sample]) -> None:
        """Serves all samples as they come: each has a server of its own."""
        ends: dict[int, float] = {}
        for group, seconds in samples:
            self.busy_s += seconds
            ends[group] = max(ends.get(group, 0.0), seconds)
        self.served += len(samples)
        for group, seconds in ends.items():
            self._sequence += 1
            heapq.heappush(self._finishing, (at + seconds, self._sequence, key, group))
        of.left.clear()

    def _serve(self, start: float, until: float) -> None:
        """Serves the current batch: one request, and on, while nothing can come between."""
        batch = self._current
        assert batch is not None
        if not self._per_step and self._overtaken(batch, start):
            return
        of = self._steps[batch.key]
        free, left, ends, samples = self._free, of.left, of.end, batch.samples
        stop = until if not self._incoming or self._per_step else min(until, self._incoming[0][0])
        limited = self._rate != math.inf
        n, most, at, busy = self._next, len(samples), batch.at, 0.0
        finishing, replace, never = self._finishing, heapq.heapreplace, -math.inf
        arrival = finishing[0][0] if finishing else math.inf
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
                heapq.heappush(finishing, (ends.pop(group), self._sequence, batch.key, group))
                del left[group]
                arrival = finishing[0][0]
            if n == most:
                break
            start = free[0]
            if start < at:
                start = at
            if self._tokens < 1.0:
                start = max(start, self._filled + (1.0 - self._tokens) / self._rate)
            if start >= stop or arrival <= start:
                break
        self.busy_s += busy
        self.served += n - self._next
        self._next = n
        if n == most:
            self._current = None

    def _overtaken(self, batch: _Batch, start: float) -> bool:
        """Puts what is left of the current batch back if one of lower order came before its next start."""
        self._take_in(start)
        if not self._waiting or self._waiting[0][0] >= batch.order:
            return False
        rest = batch._replace(samples=batch.samples[self._next :])
        heapq.heappush(self._waiting, (batch.order, 0, rest))  # 0: ahead of its equals, as it came before them
        self._current = None
        return True

    # --- delivering ---------------------------------------------------------------------------------------

    def _deliver_arrived(self) -> Delivery | None:
        """What was there before somebody waited for it, or before it was their turn."""
        for key, of in self._steps.items():
            if of.waiters and (found := self._deliver(key, of)):
                return found
        return None

    def _deliver(self, key: Hashable, of: _Step) -> Delivery | None:
        waiter = of.waiters[0]
        if waiter.by_index:
            wanted = sorted(of.unclaimed)[: waiter.count]
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
        return Delivery(of.delivered, waiter.who, groups)
