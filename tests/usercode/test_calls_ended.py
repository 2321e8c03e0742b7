"""Calls that time out or are cancelled, and events of a call in any order."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.usercode.calls import GRACE_S, REMIND_S, Timeouts
from dataflow.usercode.failures import TimedOut
from tests.rigs.virtual_time import run_virtual, timers
from tests.usercode.call_bench import Bench, Ends, Slow, coroutine, run, stubborn

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]


# --- time-outs -----------------------------------------------------------------------------------------------


def test_an_async_call_that_is_late_is_cancelled() -> None:
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append("cleaned up")

    async def body() -> None:
        bench = Bench()
        _call, ends = bench.start(slow, 7.0)
        await ends.done.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(7.0, abs=1e-3)
        (error,) = ends.errors
        assert isinstance(error, TimedOut)
        assert str(error) == "no answer within 7 s"
        await ends.free.wait()
        assert ended == ["cleaned up"]
        assert ends.once == (1, 1)
        assert (bench.strays, bench.calls.abandoned, bench.bugs) == ([], 0, [])

    run_virtual(body)


def test_a_thread_that_is_late_becomes_a_stray_until_it_returns() -> None:
    hold = threading.Event()

    async def body(bench: Bench) -> None:
        _call, ends = bench.start(hold.wait, 0.02)
        await ends.free.wait()
        assert isinstance(ends.errors[0], TimedOut)
        assert bench.strays == [1]
        assert bench.calls.abandoned == 1
        assert (await bench.end_of(lambda: 3)).results == [3], "others find a thread of their own"
        hold.set()
        async with asyncio.timeout(10):
            while bench.calls.abandoned:
                await asyncio.sleep(0.001)  # nobody is told of the end of a stray
        assert ends.once == (1, 1)
        assert not bench.calls.live

    run(body)


def test_an_answer_after_the_time_is_over_is_none() -> None:
    hold = threading.Event()

    def late() -> Any:
        hold.wait()
        return coroutine()

    async def body(bench: Bench) -> None:
        call, ends = bench.start(late, 0.02)
        await ends.free.wait()
        hold.set()  # what it makes now is awaited by nobody, and no warning may say so
        while not call.ended:
            await asyncio.sleep(0.001)
        assert (ends.results, call.result) == ([None], None)
        assert ends.once == (1, 1)

    run(body)


def test_the_coroutine_that_a_sync_function_made_is_cancelled_when_its_time_is_over() -> None:
    async def body(bench: Bench) -> None:
        ends = await bench.end_of(lambda: asyncio.sleep(100), 0.05)
        assert isinstance(ends.errors[0], TimedOut)
        assert bench.calls.abandoned == 0

    run(body)


def test_a_coroutine_that_swallows_its_cancellation_becomes_a_stray() -> None:
    async def body() -> None:
        bench, loop = Bench(), asyncio.get_running_loop()
        call, ends = bench.start(stubborn, 5.0)
        await ends.done.wait()
        assert isinstance(ends.errors[0], TimedOut)
        assert ends.freed == 0, "it may still end in its grace"
        await ends.free.wait()
        assert loop.time() == pytest.approx(5.0 + GRACE_S, abs=1e-3)
        assert (bench.strays, bench.calls.abandoned) == ([1], 1)
        await asyncio.sleep(50)
        assert call.ended
        assert bench.calls.abandoned == 0, "it has ended at last"
        assert ends.once == (1, 1)
        assert ends.results == [None], "what a stray returns is too late"

    run_virtual(body)


def test_one_that_ends_in_its_grace_is_no_stray() -> None:
    async def cleanup() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(GRACE_S / 2)

    async def body() -> None:
        bench = Bench()
        _call, ends = bench.start(cleanup, 5.0)
        await ends.free.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(5.0 + GRACE_S / 2, abs=1e-3)
        await asyncio.sleep(10)
        assert (bench.strays, bench.calls.abandoned) == ([], 0)

    run_virtual(body)


def test_many_equal_and_different_times_each_end_on_their_own() -> None:
    times = [1.0, 3.0, 2.0, 1.0, 2.0, 0.5, 3.0, 1.0, 0.0]

    async def body() -> None:
        bench, loop = Bench(), asyncio.get_running_loop()
        began, ended = [], [0.0] * len(times)
        errors: list[weakref.ref[BaseException]] = []

        async def watch(i: int, ends: Ends) -> None:
            await ends.done.wait()
            ended[i] = loop.time()
            assert ends.errors[0] is not None
            errors.append(weakref.ref(ends.errors[0]))

        watchers = []
        for i, seconds in enumerate(times):
            began.append(loop.time())
            _call, ends = bench.start(stubborn, seconds)
            watchers.append(asyncio.create_task(watch(i, ends)))
            await asyncio.sleep(0.1)
        await asyncio.gather(*watchers)
        for begin, end, seconds in zip(began, ended, times, strict=True):
            assert end - begin == pytest.approx(seconds, abs=1e-3)
        await asyncio.sleep(60)
        assert bench.calls.abandoned == 0
        del _call, ends
        assert not any(error() for error in errors), "nothing is kept of calls that ended"
        assert not timers()

    run_virtual(body)


class Answer:
    """What a call returns; it is there while the call is kept."""

    @staticmethod
    async def given() -> Answer:
        await asyncio.sleep(0)
        return Answer()


def test_one_timer_serves_all_calls_of_a_time_and_lets_go_of_those_that_ended() -> None:
    async def body() -> None:
        bench = Bench()
        answers: list[weakref.ref[Answer]] = []
        for _ in range(500):
            _call, ends = bench.start(Answer.given, 60.0)
            await ends.free.wait()
            answers.append(weakref.ref(ends.results[0]))
        del _call, ends
        assert len(timers()) == 1
        assert sum(answer() is not None for answer in answers) == 1, "only the last call is kept until its time is over"
        await asyncio.sleep(61)
        assert not timers()
        assert not any(answer() for answer in answers)

    run_virtual(body)


def test_a_time_that_is_over_before_the_call_ran_ends_it() -> None:
    ran: list[int] = []

    async def never() -> None:
        ran.append(1)
        await asyncio.sleep(100)

    async def body(bench: Bench) -> None:
        ends = await bench.end_of(never, 0.0)
        assert isinstance(ends.errors[0], TimedOut)
        assert ends.once == (1, 1)

    run(body)


def test_a_call_whose_time_out_is_still_to_come_keeps_nothing_of_its_task() -> None:
    async def body(bench: Bench) -> None:
        tasks: list[weakref.ref[Any]] = []
        answers: list[weakref.ref[Answer]] = []

        async def notes() -> Answer:
            tasks.append(weakref.ref(asyncio.current_task()))
            answer = Answer()
            answers.append(weakref.ref(answer))
            return answer

        gc.disable()
        try:
            await bench.end_of(notes, timeout_s=60.0)
            await asyncio.sleep(0)
            assert answers[0]() is not None, "the call is kept until its time is over"
            assert tasks[0]() is None
        finally:
            gc.enable()

    run(body)


def test_timeouts_that_are_closed_expire_nothing() -> None:
    async def body() -> None:
        bench = Bench()
        timeouts = Timeouts(asyncio.get_running_loop())
        call, ends = bench.start(Slow())
        timeouts.add(call, 1.0)
        timeouts.close()
        await asyncio.sleep(5)
        assert ends.once == (0, 0)
        await bench.calls.close()

    run_virtual(body)


# --- cancel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_cancelled_task_tells_nobody_and_gives_its_slot_up(turns: int) -> None:
    async def body(bench: Bench) -> None:
        call, ends = bench.start(Slow(), 50.0)
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await ends.free.wait()
        assert ends.once == (0, 1)
        assert call.ended
        assert isinstance(call.error, asyncio.CancelledError), "it is no success, and nobody must take it for one"

    run(body)


def test_a_thread_behind_a_cancelled_call_keeps_its_slot_until_it_returns() -> None:
    hold = threading.Event()

    async def body(bench: Bench) -> None:
        call, ends = bench.start(hold.wait, 60.0)
        call.cancel()
        call.cancel()
        await asyncio.sleep(0.02)
        assert ends.once == (0, 0)
        hold.set()
        await ends.free.wait()
        assert ends.once == (0, 1)
        assert bench.strays == []

    run(body)


def test_a_thread_behind_a_cancelled_call_that_runs_out_of_time_is_a_stray() -> None:
    hold = threading.Event()

    async def body(bench: Bench) -> None:
        call, ends = bench.start(hold.wait, 0.05)
        call.cancel()
        await ends.free.wait()
        assert ends.once == (0, 1)
        assert bench.strays == [1]
        hold.set()

    run(body)


def test_what_a_cancelled_thread_makes_is_not_awaited() -> None:
    hold = threading.Event()

    def late() -> Any:
        hold.wait()
        return coroutine()

    async def body(bench: Bench) -> None:
        call, ends = bench.start(late)
        call.cancel()
        hold.set()
        await ends.free.wait()
        assert ends.once == (0, 1)

    run(body)


def test_cancel_after_the_end_changes_nothing() -> None:
    async def body() -> None:
        bench = Bench()
        call, ends = bench.start(coroutine, 5.0)
        await ends.free.wait()
        call.cancel()
        await asyncio.sleep(10 * GRACE_S)
        assert ends.once == (1, 1)
        assert (bench.strays, bench.calls.abandoned) == ([], 0), "it ended: it runs nowhere"
        assert call.result == 3

    run_virtual(body)


def test_a_stray_that_is_cancelled_again_counts_once() -> None:
    async def body() -> None:
        bench = Bench()
        call, ends = bench.start(stubborn, 5.0)
        await ends.free.wait()
        call.cancel()
        await asyncio.sleep(10 * GRACE_S)
        assert (bench.strays, bench.calls.abandoned) == ([1], 1)
        await asyncio.sleep(50)
        assert bench.calls.abandoned == 0
        assert ends.once == (1, 1)

    run_virtual(body)


def test_cancel_within_the_grace_of_a_time_out() -> None:
    async def body() -> None:
        bench = Bench()
        call, ends = bench.start(stubborn, 5.0)
        await ends.done.wait()
        call.cancel()
        await ends.free.wait()
        assert (bench.strays, ends.once) == ([1], (1, 1))
        await asyncio.sleep(60)
        assert bench.calls.abandoned == 0

    run_virtual(body)


# --- any order of events -------------------------------------------------------------------------------------


class JumpingThreads:
    """Threads of a loop whose clock jumps: each job takes the seconds that are set."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.seconds = 0.0

    def run(self, job: Callable[[], Callable[[], None]]) -> None:
        self._loop.call_later(self.seconds, lambda: job()())

    def close(self) -> None:
        pass


TIMES = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0])


@dataclass(frozen=True)
class Plan:
    """What one call does, and what is done to it."""

    sync: bool
    seconds: float
    ending: str
    stubborn: bool
    timeout_s: float | None
    cancels: tuple[float, ...]

    def function(self) -> Callable[[], Any]:
        async def later() -> int:
            await (stubborn(self.seconds) if self.stubborn else asyncio.sleep(self.seconds))
            return now()

        def now() -> int:
            if self.ending != "returns":
                raise {"raises": ValueError, "cancels": asyncio.CancelledError, "exits": SystemExit}[self.ending]
            return 1

        return now if self.sync else later


plans = st.builds(
    Plan,
    sync=st.booleans(),
    seconds=TIMES,
    ending=st.sampled_from(["returns", "raises", "cancels", "exits"]),
    stubborn=st.booleans(),
    timeout_s=st.none() | TIMES,
    cancels=st.lists(TIMES, max_size=2).map(tuple),
)


@given(st.lists(plans, min_size=1, max_size=8))
def test_in_any_order_each_call_is_told_of_once_and_gives_its_slot_up_once(plans: list[Plan]) -> None:
    async def body() -> None:
        loop = asyncio.get_running_loop()
        threads = JumpingThreads(loop)
        with mock.patch("dataflow.usercode.calls.Threads", return_value=threads):
            bench = Bench()
        started = []
        for plan in plans:
            threads.seconds = plan.seconds
            call, ends = bench.start(plan.function(), plan.timeout_s)
            for at in plan.cancels:
                loop.call_later(at, call.cancel)
            started.append((plan, ends))
        await asyncio.sleep(30)
        for plan, ends in started:
            done, freed = ends.once
            assert freed == 1
            assert done <= 1
            assert done == 1 or plan.cancels, "unless it was cancelled, somebody is told"
            assert ends.told_first
            assert plan.timeout_s is not None or not isinstance(ends.errors[0] if done else None, TimedOut)
        assert bench.calls.abandoned == 0, "all have ended"
        assert not bench.calls.live
        assert bench.bugs == []
        await asyncio.sleep(REMIND_S)
        assert not timers()
        await bench.calls.close()

    run_virtual(body)
