"""Async code that blocks its event loop is named in the log."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest

from dataflow.usercode.watchdog import Watchdog
from tests.usercode.call_bench import Bench

pytestmark = pytest.mark.timeout(60)


class Said:
    """What a watchdog says, and a way to wait for it in another thread."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.more = threading.Event()

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        self.more.set()


def bench_with(after_s: float, said: Said) -> Bench:
    """Returns calls whose watchdog reports after these seconds, and to a test."""
    with mock.patch("dataflow.usercode.calls.Watchdog", partial(Watchdog, after_s=after_s, log=said)):
        return Bench()


def watched(function: Callable[..., Any], after_s: float = 0.05, **keywords: Any) -> list[str]:
    """Calls the function on an event loop with a watchdog; returns the watchdog's messages."""
    said = Said()

    async def body() -> None:
        bench = bench_with(after_s, said)
        _call, ends = bench.start(function, said=said, **keywords)
        async with asyncio.timeout(30):
            await ends.done.wait()
            await ends.free.wait()
        await bench.calls.close()

    asyncio.run(body())
    return said.texts


async def blocks(said: Said) -> None:
    await asyncio.sleep(0)
    assert said.more.wait(20), "nobody said anything"


async def inner(said: Said) -> None:
    await blocks(said)


def test_a_function_that_blocks_is_named_with_its_line() -> None:
    texts = watched(inner)
    line = inner.__code__.co_firstlineno + 1
    assert texts[0].startswith(f"'inner' (test_watchdog.py:{line}) has blocked the event loop for 0 s: ")
    assert texts[0].endswith("write it as a plain def, which runs in a thread.")


def test_it_is_said_again_while_it_lasts_and_ever_more_seldom() -> None:
    async def long(said: Said) -> None:
        end = time.monotonic() + 20
        while len(said.texts) < 3 and time.monotonic() < end:
            said.more.wait(0.05)

    assert len(watched(long)) == 3


def test_one_that_awaits_and_one_in_a_thread_are_none() -> None:
    async def awaits(said: Said) -> None:
        await asyncio.sleep(0.5)

    def in_a_thread(said: Said) -> None:
        time.sleep(0.5)

    assert watched(awaits) == []
    assert watched(in_a_thread) == []


def test_what_else_holds_up_the_loop_is_not_the_users() -> None:
    async def other(said: Said) -> None:
        asyncio.get_running_loop().call_soon(time.sleep, 0.5)
        await asyncio.sleep(0.1)

    assert watched(other) == []


def test_the_thread_ends_with_the_calls_and_comes_back_with_the_next() -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == "reward-watchdog"]

    async def body() -> None:
        before = set(threads())
        said = Said()
        bench = bench_with(0.02, said)
        for _ in range(2):
            stop = asyncio.Event()
            calls = [bench.start(stop.wait) for _ in range(3)]
            mine = [thread for thread in threads() if thread not in before]
            assert len(mine) == 1
            stop.set()
            for _call, ends in calls:
                await ends.free.wait()
            await asyncio.to_thread(mine[0].join, 20)
            assert not mine[0].is_alive()
        await bench.calls.close()
        assert said.texts == []

    asyncio.run(body())


@pytest.mark.parametrize("closed", [True, False])
def test_the_thread_ends_with_its_loop(closed: bool) -> None:
    found: list[threading.Thread] = []

    async def body() -> None:
        before = set(threading.enumerate())
        bench = bench_with(0.02, Said())
        bench.start(asyncio.Event().wait)
        found.extend(set(threading.enumerate()) - before)
        if closed:
            await bench.calls.close()

    asyncio.run(body())
    assert len(found) == 1
    found[0].join(20)
    assert not found[0].is_alive()
