"""Fits the service time of a reward model's servers to the requests of a run. Pure."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dataflow.planning.servers.service_time import ServiceTime
from dataflow.timeline.spans import Mark, called, in_flight

MOST = 10_000
"""Requests that a fit looks at, the latest ones."""
_TOLERANCES = (0.001, 0.003, 0.01, 0.03, 0.1)  # of the median latency, within which the answers of a batch come
_ALIKE = 0.95
_LEAST_SPREAD = 0.05  # of the logarithm of the requests that begin later; below, a run shows one load
_MARGIN = 0.02  # of the median latency, within which requests come at once


class Call(NamedTuple):
    """A request at a server: its begin and end in seconds, and whether it is a whole one that was tried once."""

    begin: float
    end: float
    whole: bool


class Batch(NamedTuple):
    """Requests that a server computed together."""

    seconds: float
    size: int
    fresh: bool
    """Whether nothing waited at the server when the batch before it ended."""
    left: int
    """Requests that came before it ended, and were not in it."""


def fit(marks: Iterable[Mark], slots: int) -> tuple[ServiceTime, tuple[float, ...]] | None:
    """Returns the service time of one server, and the seconds that each request would have taken alone on it.

    Args:
        marks: the requests of an agent, with the server in ``endpoint``; without it they are those of one server.
        slots: requests in flight at one server at most; others wait before it.

    Returns:
        None if no request was answered.
    """
    answered = sorted((m for m in marks if m.end > m.begin and called(m.args)), key=lambda m: m.begin)[-MOST:]
    if not answered:
        return None
    by_server: dict[str, list[Mark]] = {}
    for mark in answered:
        by_server.setdefault(str(mark.args.get("endpoint", "")), []).append(mark)
    servers = [_calls(of, slots) for of in by_server.values()]
    found = _batch_time(servers)
    if found is not None:
        return found, (found.seconds(1),)
    return _shared_time(servers)


def _calls(marks: Sequence[Mark], slots: int) -> list[Call]:
    """Returns a server's requests, each from when it had a slot there."""
    calls: list[Call] = []
    running: list[float] = []
    for mark in marks:
        begin = mark.begin
        while running and running[0] <= begin:
            heapq.heappop(running)
        if len(running) >= slots:
            begin = max(begin, heapq.heappop(running))
        if begin < mark.end:
            heapq.heappush(running, mark.end)
            calls.append(Call(begin, mark.end, mark.args.get("tries", 1) == 1))
    return calls


# --- batches ----------------------------------------------------------------------------------------------------------


def _batch_time(servers: Sequence[Sequence[Call]]) -> ServiceTime | None:
    """Returns the service time of servers that compute batches; None if the answers do not come as batches' do."""
    usual = statistics.median(call.end - call.begin for calls in servers for call in calls)
    best, alike = [], 0.0
    for tolerance in _TOLERANCES:
        found = [_batches(calls, tolerance * usual) for calls in servers]
        agree = statistics.fmean(share for _, shares in found for share in shares)
        if agree > alike:
            best, alike = [batch for batches, _ in found for batch in batches], agree
    sizes, seconds = [batch.size for batch in best], [batch.seconds for batch in best]
    if alike < _ALIKE or max(sizes, default=1) == 1:
        return None
    # An idle server may begin with the first of a burst, or with all of it; a request that came alone shows neither.
    most = max(sizes)
    fresh = [batch for batch in best if batch.fresh and (batch.left or batch.size > 1)]
    first = tuple(batch.size if batch.left else most for batch in fresh) or (most,)
    if min(sizes) == max(sizes):
        return ServiceTime(0.0, statistics.fmean(seconds) / sizes[0], True, first, known=False)
    each, base = statistics.linear_regression(sizes, seconds)
    if base < 0 or each < 0:
        # Of non-negative times the nearest line goes through the origin, or is level.
        each = sum(map(math.prod, zip(sizes, seconds, strict=True))) / sum(n * n for n in sizes) if base < 0 else 0.0
        base = 0.0 if base < 0 else statistics.fmean(seconds)
    return ServiceTime(base, each, True, first)


def _batches(calls: Sequence[Call], tolerance: float) -> tuple[list[Batch], list[float]]:
    """Groups answers that come within ``tolerance`` of each other.

    Returns:
        The groups as batches, and for each how much alike the group is to all requests that a batch would have begun
        with, from 0 to 1.
    """
    ended = sorted(calls, key=lambda call: call.end)
    begins = sorted(call.begin for call in calls)
    batches, shares, done = [], [], 0
    last = first = -math.inf  # the last and the first answer of the batch before
    while done < len(ended):
        size = 1
        while done + size < len(ended) and ended[done + size].end - ended[done + size - 1].end <= tolerance:
            size += 1
        of = ended[done : done + size]
        came = min(call.begin for call in of)
        start, end = max(last, came), of[-1].end
        idle = came > last
        # Requests that came with the answers of the batch before may be in this one; those that came earlier must be.
        there = 0 if idle else bisect.bisect_left(begins, first) - done
        possible = sum(call.begin <= start + tolerance for call in of)
        certain = sum(call.begin < first for call in of)
        shares.append(possible / (size + max(0, there - certain)))
        batches.append(Batch(end - start, size, idle or not there, bisect.bisect_left(begins, end) - done - size))
        done, last, first = done + size, end, of[0].end
    return batches, shares


# --- sharing ----------------------------------------------------------------------------------------------------------


def _shared_time(servers: Sequence[Sequence[Call]]) -> tuple[ServiceTime, tuple[float, ...]]:
    """Returns the service time of servers whose requests share them, and the seconds of each request alone.

    A request's work is the integral of its speed, 1 / (1 - share + share * n), where n is the load of its server at
    each time. The work of requests does not depend on the load; so ``share`` is that for which work and load do not
    correlate. The load is measured by the requests that begin later, before the server is idle again: after the last
    ones it falls. The load over a request's own time would depend on its work, as long requests are the last ones left.
    """
    usual = statistics.median(call.end - call.begin for calls in servers for call in calls)
    loads = [_Load(calls) for calls in servers]
    chosen = [(load, call) for load, calls in zip(loads, servers, strict=True) for call in calls if call.whole]
    chosen = chosen or [(load, call) for load, calls in zip(loads, servers, strict=True) for call in calls]
    later = [math.log1p(load.after(call.begin, _MARGIN * usual)) for load, call in chosen]
    known = statistics.pstdev(later) >= _LEAST_SPREAD

    def works(share: float) -> list[float]:
        for load in loads:
            load.slow_down(share)
        return [load.work(call.begin, call.end) for load, call in chosen]

    def trend(share: float) -> float:
        return statistics.covariance([math.log(max(work, 1e-12)) for work in works(share)], later)

    share = _root(trend) if known else 1.0
    found = works(share)
    alone = statistics.fmean(found)
    return ServiceTime(alone * (1 - share), alone * share, known=known), tuple(found)


def _root(of: Callable[[float], float]) -> float:
    """Returns where a falling function of 0..1 crosses 0; the end that is nearer to 0 if it does not."""
    low, high = 0.0, 1.0
    if of(low) <= 0:
        return low
    if of(high) >= 0:
        return high
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if of(middle) > 0 else (low, middle)
    return (low + high) / 2


class _Load:
    """The requests in flight at a server over time."""

    def __init__(self, calls: Sequence[Call]) -> None:
        levels = in_flight(Mark("", "", call.begin, call.end) for call in calls)
        self.times = [time for time, _ in levels]
        self.levels = [float(max(1, level)) for _, level in levels]
        self._begins = sorted(call.begin for call in calls)
        self._idle = [time for time, level in levels if level == 0]
        self._speeds: list[float] = []
        self._work: list[float] = []

    def _integral(self, values: Sequence[float]) -> list[float]:
        pieces = ((b - a) * value for (a, b), value in zip(itertools.pairwise(self.times), values, strict=False))
        return [0.0, *itertools.accumulate(pieces)]

    def _at(self, time: float, sums: Sequence[float], values: Sequence[float]) -> float:
        i = max(0, bisect.bisect_right(self.times, time) - 1)
        return sums[i] + (time - self.times[i]) * values[i]

    def after(self, begin: float, margin: float) -> int:
        """Returns how many begin later than a request, before the server is idle; at most the number then in flight.

        Those within ``margin`` came with it.
        """
        i = bisect.bisect_right(self.times, begin) - 1
        busy = bisect.bisect_right(self._idle, begin)
        until = self._idle[busy] if busy < len(self._idle) else math.inf
        later = bisect.bisect_left(self._begins, until) - bisect.bisect_right(self._begins, begin + margin)
        return max(0, min(later, int(self.levels[i])))

    def slow_down(self, share: float) -> None:
        """Sets how far requests in flight slow each other down, from 0 to 1."""
        self._speeds = [1 / (1 - share + share * level) for level in self.levels]
        self._work = self._integral(self._speeds)

    def work(self, begin: float, end: float) -> float:
        """Returns the work that is done on one request between two times."""
        return self._at(end, self._work, self._speeds) - self._at(begin, self._work, self._speeds)
