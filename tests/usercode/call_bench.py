"""Calls of user code on a test's event loop, and a record of their callbacks."""

from __future__ import annotations

import asyncio
import gc
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from dataflow.usercode.calls import Call, Calls


@dataclass
class Ends:
    """The callbacks of one call."""

    results: list[Any] = field(default_factory=list)
    errors: list[BaseException | None] = field(default_factory=list)
    freed: int = 0
    told_first: bool = True
    done: asyncio.Event = field(default_factory=asyncio.Event)
    free: asyncio.Event = field(default_factory=asyncio.Event)

    def on_done(self, call: Call) -> None:
        self.results.append(call.result)
        self.errors.append(call.error)
        self.told_first = self.told_first and not self.freed
        self.done.set()

    def on_freed(self, call: Call) -> None:
        self.freed += 1
        self.free.set()

    @property
    def once(self) -> tuple[int, int]:
        return len(self.errors), self.freed


class Bench:
    """Calls, and what was reported of them."""

    def __init__(self) -> None:
        self.strays: list[int] = []
        self.bugs: list[Exception] = []
        self.calls = Calls(self.strays.append, self.bugs.append)

    def start(self, function: Callable[..., Any], timeout_s: float | None = None, **keywords: Any) -> tuple[Call, Ends]:
        ends = Ends()
        call = self.calls.start(function, keywords, on_done=ends.on_done, on_freed=ends.on_freed, timeout_s=timeout_s)
        return call, ends

    async def end_of(self, function: Callable[..., Any], timeout_s: float | None = None) -> Ends:
        _call, ends = self.start(function, timeout_s)
        await ends.done.wait()
        await ends.free.wait()
        return ends


def run(body: Callable[[Bench], Coroutine[Any, Any, Any]]) -> None:
    """Runs it on a real loop; fails for coroutines that were not awaited and errors that were not retrieved."""
    unseen: list[Any] = []

    async def limited() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
        async with asyncio.timeout(20):
            bench = Bench()
            await body(bench)
            await bench.calls.close()
        for _ in range(3):
            await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(limited())
        gc.collect()
    assert not unseen, unseen
    assert not [str(w.message) for w in caught if "never" in str(w.message)]


async def coroutine() -> int:
    await asyncio.sleep(0)
    return 3


class Slow:
    async def __call__(self) -> None:
        await asyncio.sleep(100)


async def stubborn(seconds: float = 50.0) -> str:
    """Takes its time, cancelled or not."""
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while (left := end - loop.time()) > 0:
        try:
            await asyncio.sleep(left)
        except asyncio.CancelledError:
            continue
    return "late"
