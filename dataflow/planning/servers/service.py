"""Simulates the servers of a reward model: a queue like the reward service, whose times depend on the load. Pure."""

from __future__ import annotations

import heapq
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from dataflow.errors import ConfigError
from dataflow.planning.requests.requests import Requests
from dataflow.planning.requests.schedule import Rate
from dataflow.planning.reward_service import Batch, Delivery, RewardService
from dataflow.planning.servers.service_time import Servers, ServiceTime

_UNLIKE = 0.005
"""How far the times of equal servers differ: of those that end at the same instant, none would fill up first."""


class Item(NamedTuple):
    """A request at a server; its work is 1 for one that takes as long as the server's service time."""

    key: Hashable
    group: int
    work: float


class ServerService(RewardService):
    """Serves requests on servers that have equally many slots; each begins on the server with the fewest in flight.

    Args:
        servers: of the model.
        concurrency: requests in flight at all servers at most.
        rpm: see :class:`~dataflow.planning.reward_service.RewardService`.
        per_step: must be False.

    The seconds of a submitted request are those that it takes alone on a server.

    Raises:
        ConfigError: a number out of range.
    """

    def __init__(self, servers: Servers, concurrency: int, rpm: float | None = None, per_step: bool = False) -> None:
        super().__init__(concurrency, rpm)
        if per_step:
            raise ConfigError(
                f"reward.agent=per-step is of rewards without servers; leave it out, as model '{servers.model}' is "
                "served."
            )
        kind = _Batching if servers.service_time.batches else _Sharing
        step = 2 * _UNLIKE / max(1, servers.replicas - 1)
        paces = [1 + step * (i - (servers.replicas - 1) / 2) for i in range(servers.replicas)]
        times = [servers.service_time.of_server(pace, i / servers.replicas) for i, pace in enumerate(paces)]
        self._servers: list[_Server] = [kind(service_time) for service_time in times]
        self._each, self._concurrency = servers.slots, concurrency
        self._rate = Rate(rpm)
        self._batch: Batch | None = None  # that is served
        self._next = 0  # request of it
        self._left: dict[Hashable, dict[int, int]] = {}  # key -> group -> requests that have not ended
        self._alone = servers.service_time.seconds(1) or 1.0
        self._running = 0
        self._now = 0.0

    def _register(self, key: Hashable, requests: Requests) -> None:
        sizes = zip(requests.ids.tolist(), requests.sizes.tolist(), strict=True)
        self._left.setdefault(key, {}).update(sizes)

    def advance(self, until: float) -> Delivery | None:
        if found := self._deliver_arrived():
            return found
        while True:
            begin = self._next_begin(until)
            server = min(self._servers, key=lambda each: each.event)
            if server.event <= begin and (server.busy or server.event < begin):
                # Requests that begin at the same time are there when an idle server begins, but after a batch's end.
                if server.event > until or (server.event == until and not server.busy):
                    return None
                self._now = server.event
                if (ended := server.advance()) and (found := self._end(ended)):
                    return found
            elif begin >= until:
                return None
            else:
                self._begin(begin)

    def _end(self, items: Sequence[Item]) -> Delivery | None:
        """Counts requests as ended; returns the first delivery of the groups that are complete with them."""
        self._running -= len(items)
        complete = False
        for key, group, _work in items:
            left = self._left[key]
            left[group] -= 1
            if not left[group]:
                del left[group]
                self._steps[key].arrive(group, self._now)
                complete = True
            if not left:
                del self._left[key]
        return self._deliver_arrived() if complete else None

    def _next_begin(self, until: float) -> float:
        """Returns when the next request can begin with the slots that are free now; infinity if none can."""
        if self._running >= self._concurrency or self._least().load >= self._each:
            return math.inf
        time = self._now
        if self._batch is None:
            if not self._waiting:
                if not self._incoming:
                    return math.inf
                time = max(time, self._incoming[0][0])
            if time >= until:
                return time  # choose none yet: an earlier one may still be submitted
            self._take_in(time)
            self._batch, self._next = heapq.heappop(self._waiting)[-1], 0
        return self._rate.earliest(max(time, self._batch.at))

    def _least(self) -> _Server:
        return min(self._servers, key=lambda each: each.load)

    def _begin(self, time: float) -> None:
        batch = self._batch
        assert batch is not None
        if self._overtaken(batch.order, time):
            self._batch = None
            self._wait_again(batch, self._next)
            return
        group, seconds = batch.requests.pairs[self._next]
        self._now = time
        self._least().add(Item(batch.key, group, seconds / self._alone), time)
        self._running += 1
        self._rate.take(time)
        self.served += 1
        self._next += 1
        if self._next == len(batch.requests):
            self._batch = None


class _Server(ABC):
    """One server.

    Attributes:
        load: requests in flight.
        event: when something ends or begins, in seconds; infinity if nothing will.
        busy: whether it computes.
    """

    def __init__(self, service_time: ServiceTime) -> None:
        self.service_time = service_time
        self.load = 0
        self.event = math.inf
        self.busy = False

    @abstractmethod
    def add(self, item: Item, now: float) -> None:
        """Starts a request."""

    @abstractmethod
    def advance(self) -> list[Item]:
        """Goes on to :attr:`event`; returns the requests that end then."""


class _Sharing(_Server):
    """A server that works on all its requests at once."""

    def __init__(self, service_time: ServiceTime) -> None:
        super().__init__(service_time)
        self._done = 0.0  # work done so far on a request that was there from the beginning
        self._at = 0.0
        self._ends: list[tuple[float, int, Item]] = []
        self._sequence = 0

    def _go_on(self, now: float) -> None:
        if self._ends:
            self._done += (now - self._at) / self._pace
        self._at = now

    @property
    def _pace(self) -> float:
        return self.service_time.seconds(self.load) or 1e-12

    def _plan(self) -> None:
        self.busy = bool(self._ends)
        self.event = self._at + max(0.0, self._ends[0][0] - self._done) * self._pace if self._ends else math.inf

    def add(self, item: Item, now: float) -> None:
        self._go_on(now)
        self._sequence += 1
        heapq.heappush(self._ends, (self._done + item.work, self._sequence, item))
        self.load += 1
        self._plan()

    def advance(self) -> list[Item]:
        self._go_on(self.event)
        self._done, _number, item = heapq.heappop(self._ends)
        self.load -= 1
        self._plan()
        return [item]


class _Batching(_Server):
    """A server that computes batches one after the other."""

    def __init__(self, service_time: ServiceTime) -> None:
        super().__init__(service_time)
        self._waiting: list[Item] = []
        self._batch: list[Item] = []
        self._firsts = itertools.cycle(service_time.first)
        self._first = next(self._firsts)

    def add(self, item: Item, now: float) -> None:
        self._waiting.append(item)
        self.load += 1
        if not self.busy:
            self.event = now
            if len(self._waiting) >= self._first:
                self._begin()

    def _begin(self) -> None:
        self._batch, self._waiting = self._waiting, []
        self.busy = True
        self.event += self.service_time.seconds(len(self._batch))

    def advance(self) -> list[Item]:
        ended, self._batch, self.busy = self._batch, [], False
        self.load -= len(ended)
        if self._waiting:
            self._begin()
        else:
            self.event = math.inf
            self._first = next(self._firsts)
        return ended
