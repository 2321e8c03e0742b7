"""A limiter whose calls end by themselves, on a virtual clock, and a record of its starts."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dataflow.rewards.limits.limits import Limits
from dataflow.rewards.limits.queues import EndpointQueue, Limiter
from dataflow.system import clock

MINUTE = 60.0 - 1e-4
"""A window of which both ends belong to it."""


@dataclass(eq=False)
class Item:
    priority: tuple[int, int, int]
    endpoint: str = ""
    tokens: int = 0
    prefers: str = ""
    avoids: tuple[str, ...] = ()
    second: bool = False
    wanted: bool = True
    seconds: float = 0.0
    """How long it will run."""


@dataclass
class Rig:
    """A limiter that starts what ends by itself, and what came of it."""

    limits: Limits
    bugs: list[Exception] = field(default_factory=list)
    begun: list[tuple[float, Item]] = field(default_factory=list)
    ended: int = 0
    most: Counter[str] = field(default_factory=Counter)
    now: Counter[str] = field(default_factory=Counter)
    sequence: int = 0

    def __post_init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.limiter = Limiter(self.limits, self.start, on_bug=self.bugs.append)

    def start(self, item: Item, queue: EndpointQueue) -> None:
        self.begun.append((self.loop.time(), item))
        for name in {"all", queue.name}:
            self.now[name] += 1
            self.most[name] = max(self.most[name], self.now[name])
        if item.seconds != math.inf:
            self.loop.call_later(item.seconds, self.end, item, queue, self.loop.time())

    def end(self, item: Item, queue: EndpointQueue, begun: float, **how: Any) -> None:
        self.ended += 1
        self.now.subtract({"all", queue.name})
        self.limiter.release(queue, clock.now() - (self.loop.time() - begun), **how)

    def push(self, count: int = 1, step: int = 1, **options: Any) -> list[Item]:
        items = []
        for _ in range(count):
            self.sequence += 1
            items.append(Item((0, step, self.sequence), **options))
            self.limiter.push(items[-1])
        self.limiter.fill()
        return items

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def times(self, endpoint: str | None = None) -> list[float]:
        return [at for at, item in self.begun if endpoint in (None, item.endpoint)]

    def most_in_a_minute(
        self, weight: Callable[[Item], float] = lambda item: 1.0, endpoint: str | None = None
    ) -> float:
        """Returns what any 60 seconds hold at most."""
        events = [(at, weight(item)) for at, item in self.begun if endpoint in (None, item.endpoint)]
        best, begin, inside = 0.0, 0, 0.0
        for at, amount in events:
            inside += amount
            while events[begin][0] < at - MINUTE:
                inside -= events[begin][1]
                begin += 1
            best = max(best, inside)
        return best


def tokens_of(item: Item) -> float:
    return float(item.tokens)
