"""Calls without a time-out that do not end are logged."""

from __future__ import annotations

import asyncio
import time

import pytest

from dataflow.usercode.calls import REMIND_S
from tests.rigs.virtual_time import run_virtual
from tests.usercode.call_bench import Bench


@pytest.mark.parametrize(("limit_s", "count"), [(None, 2), (10 * REMIND_S, 0)])
def test_a_call_that_never_ends_is_logged(
    monkeypatch: pytest.MonkeyPatch, warned: list[str], limit_s: float | None, count: int
) -> None:
    async def body() -> None:
        bench = Bench()
        monkeypatch.setattr(time, "perf_counter", asyncio.get_running_loop().time)
        hold = asyncio.Event()
        call, _ends = bench.start(hold.wait, limit_s)
        await bench.start(asyncio.Event().wait, 1.0)[1].done.wait()
        await asyncio.sleep(2.5 * REMIND_S)
        call.cancel()
        await asyncio.sleep(10 * REMIND_S)
        await bench.calls.close()

    run_virtual(body)
    assert [line.partition(".")[0] for line in warned] == [
        f"Calls that have had no answer for {minutes} minutes, and that no time-out ends: 1"
        for minutes in (10, 20)[:count]
    ]
