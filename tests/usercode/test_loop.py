"""User code does not end the event loop that it shares with the run."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from dataflow.usercode.loop import protect
from tests.usercode.call_bench import Bench, coroutine, run


async def stops() -> None:
    asyncio.get_running_loop().stop()


async def stops_soon() -> int:
    asyncio.get_running_loop().call_soon(asyncio.get_running_loop().stop)
    await asyncio.sleep(0.01)
    return 1


async def stops_in_a_task() -> None:
    await asyncio.create_task(stops())


async def exits_in_a_task() -> None:
    async def leave() -> None:
        raise SystemExit(0)

    await asyncio.create_task(leave())


@pytest.mark.timeout(60)
@pytest.mark.parametrize("function", [stops, stops_in_a_task, exits_in_a_task])
def test_who_tries_to_end_it_has_failed_and_the_loop_goes_on(function: Callable[[], Any]) -> None:
    async def body(bench: Bench) -> None:
        (error,) = (await bench.end_of(function)).errors
        assert "may not stop it" in str(error) or "SystemExit" in str(error)
        assert (await bench.end_of(coroutine)).results == [3]

    run(body)


@pytest.mark.timeout(60)
def test_a_callback_does_not_stop_it_either() -> None:
    told: list[str] = []

    async def body(bench: Bench) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(str(context["exception"])))
        assert (await bench.end_of(stops_soon)).results == [1]

    run(body)
    assert len(told) == 1
    assert "may not stop it" in told[0]


@pytest.mark.timeout(60)
def test_the_run_itself_stops_it() -> None:
    loop = asyncio.new_event_loop()

    async def body() -> None:
        protect(loop)
        protect(loop)
        threading.Thread(target=lambda: loop.call_soon_threadsafe(loop.stop)).start()

    try:
        task = loop.create_task(body())
        loop.run_forever()
        assert task.done()
        assert loop.run_until_complete(asyncio.sleep(0, 5)) == 5
    finally:
        loop.close()
