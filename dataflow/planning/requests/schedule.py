"""When the requests of one batch begin and end, if no other batch overtakes it, and when its groups arrive. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Hashable
from copy import copy
from heapq import heapreplace

import numpy as np

from dataflow.planning.requests.requests import Numbers, Seconds


class Arrivals:
    """The groups of one batch, in the order in which their last requests end.

    Attributes:
        key: of the batch.
        at: number of groups that have arrived.
        groups, ends: the groups, and when they arrive.
        lasts: the number of the request of each group that is served last.
        served: number of requests that are served; a group arrives only after its last one is.
    """

    def __init__(self, key: Hashable, groups: Numbers, ends: Seconds, lasts: Numbers, served: float) -> None:
        order = np.lexsort((lasts, ends))
        self.key = key
        self.at = 0
        self.groups: list[int] = groups[order].tolist()
        self.ends: list[float] = ends[order].tolist()
        self.lasts: list[int] = lasts[order].tolist()
        self.served = served

    @property
    def next(self) -> float:
        """When the next group arrives; infinity if none does before more requests are served."""
        at = self.at
        return self.ends[at] if at < len(self.ends) and self.lasts[at] < self.served else math.inf

    def until(self, time: float, included: bool = True) -> int:
        """Returns how many groups have arrived at a time, those that arrive exactly then ``included``."""
        end = (bisect_right if included else bisect_left)(self.ends, time, self.at)
        # Of requests without duration some may not be served yet.
        while end > self.at and self.lasts[end - 1] >= self.served:
            end -= 1
        return end

    def drop_unserved(self) -> list[int]:
        """Drops and returns the groups that have requests left to serve."""
        rest = list(zip(self.groups, self.ends, self.lasts, strict=True))[self.at :]
        kept = [each for each in rest if each[2] < self.served]
        self.at = 0
        self.groups, self.ends, self.lasts = [list(of) for of in zip(*kept, strict=True)] or ([], [], [])
        return [group for group, _end, last in rest if last >= self.served]


class Rate:
    """A limit of requests a minute, spread evenly with bursts of at most one second's worth, as the agent sends them.

    Args:
        rpm: requests started per minute at most; None for no limit.
    """

    def __init__(self, rpm: float | None) -> None:
        self._rate = math.inf if rpm is None else rpm / 60.0
        self._bucket = math.inf if rpm is None else max(1.0, self._rate)
        self._tokens, self._filled = self._bucket, 0.0

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._rate != math.inf

    def earliest(self, time: float) -> float:
        """Returns when the next request may start, at ``time`` or later."""
        return max(time, self._filled + (1.0 - self._tokens) / self._rate) if self._tokens < 1.0 else time

    def take(self, start: float) -> None:
        """Counts a request that starts."""
        if self.limited:
            self._tokens = min(self._bucket, self._tokens + (start - self._filled) * self._rate) - 1.0
            self._filled = start


class Slots:
    """The slots of a service, each free from some time on.

    Args:
        count: number of slots.
        rate: at which requests start.
    """

    def __init__(self, count: int, rate: Rate) -> None:
        self.rate = rate
        self._free = [0.0] * count  # heap

    @property
    def first(self) -> float:
        """When the first slot is free."""
        return self._free[0]

    @property
    def last(self) -> float:
        """When all slots are free."""
        return max(self._free)

    def all_free_at(self, time: float) -> None:
        """Has all slots free from one time on."""
        self._free = [time] * len(self._free)

    def earliest(self, at: float) -> float:
        """Returns when a request that is sent at a time can begin."""
        return self.rate.earliest(max(self._free[0], at))

    def serve(self, seconds: Seconds, at: float) -> Schedule:
        """Serves requests that are sent at a time and take these seconds, each in the slot that is free first."""
        before = Slots(0, copy(self.rate))
        before._free = self._free.copy()
        free, took = self._free, seconds.tolist()
        if self.rate.limited:
            starts = []
            for each in took:
                starts.append(self.earliest(at))
                heapreplace(free, starts[-1] + each)
                self.rate.take(starts[-1])
        else:
            if free[0] < at:
                # All that begins later begins at this time or after it; the heap keeps its order.
                free[:] = [max(each, at) for each in free]
            starts = [heapreplace(free, free[0] + each) for each in took]
        return Schedule(starts, seconds, before)

    def after(self, starts: list[float], ends: list[float]) -> Slots:
        """Returns these slots once requests have taken them at ``starts`` until ``ends``, in this order."""
        # Each took the slot that was free first, and left it free no sooner than that: what is left is the latest.
        self._free = sorted(self._free + ends)[len(ends) :]
        for start in starts:
            self.rate.take(start)
        return self


class Schedule:
    """The times of the requests of one batch.

    Attributes:
        starts: when each request begins, in the order they are served.
        ends: when each ends, shape (requests,).
    """

    def __init__(self, starts: list[float], seconds: Seconds, before: Slots) -> None:
        self.starts = starts
        self.ends: Seconds = np.array(starts) + seconds
        self._before = before

    def undone(self, served: int) -> Slots:
        """Returns the slots as they are if only the first ``served`` requests were served."""
        return self._before.after(self.starts[:served], self.ends[:served].tolist())
