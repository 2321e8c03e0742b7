"""Calls of user code: each has one outcome and frees its slot once, whatever the code does."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.usercode.calls import GRACE_S, Calls
from dataflow.usercode.failures import TimedOut, UserExit
from tests.rigs.virtual_time import run_virtual, timers

pytestmark = pytest.mark.timeout(60)


class Bench:
    """Calls, and what was reported of them."""

    def __init__(self) -> None:
        self.abandoned: list[int] = []
        self.calls = Calls(self.abandoned.append)
        self.freed: list[Any] = []
        """The result, or the type of the error, of each slot that was freed."""
        self.free = asyncio.Event()

    def run(self, function: Callable[..., Any], timeout_s: float | None = None, **keywords: Any) -> asyncio.Task[Any]:
        def on_free(result: Any, error: BaseException | None) -> None:
            self.freed.append(result if error is None else type(error))
            self.free.set()

        return asyncio.create_task(self.calls.run(function, keywords, timeout_s, on_free))


def on_loop(body: Callable[[Bench], Coroutine[Any, Any, Any]], run: Callable[..., Any] = run_virtual) -> None:
    """Runs it; fails for coroutines that were not awaited and errors that were not retrieved."""
    unseen: list[Any] = []

    async def limited() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unseen.append(context))
        async with asyncio.timeout(20 if run is asyncio.run else None):
            bench = Bench()
            await body(bench)
            await bench.calls.close()
        for _ in range(3):
            await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(limited if run is run_virtual else limited())
        gc.collect()
    assert not unseen, unseen
    assert not [str(w.message) for w in caught if "never" in str(w.message)]


with_threads = partial(on_loop, run=asyncio.run)


async def later(result: Any = 3) -> Any:
    await asyncio.sleep(0)
    return result


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


# --- outcomes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [later, lambda: 3, lambda: later()])
def test_every_kind_of_function_returns(function: Any) -> None:
    async def body(bench: Bench) -> None:
        assert await bench.run(function) == 3
        assert bench.freed == [3]

    with_threads(body)


@pytest.mark.parametrize("waits", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("no"), ValueError),
        (StopIteration(), RuntimeError),
        (SystemExit(3), UserExit),
        (asyncio.CancelledError("mine"), UserExit),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, BaseException) else "",
)
def test_whatever_is_raised_is_an_exception_of_that_call(error: BaseException, kind: type, waits: bool) -> None:
    async def fails() -> None:
        raise error

    def fails_now() -> None:
        raise error

    async def body(bench: Bench) -> None:
        with pytest.raises(kind) as caught:
            await bench.run(fails if waits else fails_now)
        assert kind is not UserExit or type(error).__name__ in str(caught.value)
        assert bench.freed == [kind]
        assert await bench.run(lambda: 3) == 3, "the loop and the thread still run"

    with_threads(body)


# --- time-outs -----------------------------------------------------------------------------------------------


def test_an_async_call_that_is_late_is_cancelled_and_cleans_up_in_its_grace() -> None:
    async def slow() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            await asyncio.sleep(GRACE_S / 2)

    async def body(bench: Bench) -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(TimedOut, match=r"^no answer within 7 s$"):
            await bench.run(slow, 7.0)
        assert bench.freed == []
        assert loop.time() == pytest.approx(7.0, abs=1e-3)
        await bench.free.wait()
        assert loop.time() == pytest.approx(7.0 + GRACE_S / 2, abs=1e-3)
        await asyncio.sleep(10)
        assert (bench.freed, bench.abandoned, bench.calls.abandoned) == ([TimedOut], [], 0)

    on_loop(body)


def test_a_coroutine_that_swallows_its_cancellation_is_abandoned_until_it_ends() -> None:
    async def body(bench: Bench) -> None:
        call = bench.run(stubborn, 5.0)
        await bench.free.wait()
        assert asyncio.get_running_loop().time() == pytest.approx(5.0 + GRACE_S, abs=1e-3)
        assert isinstance(call.exception(), TimedOut)
        assert (bench.abandoned, bench.calls.abandoned) == ([1], 1)
        await asyncio.sleep(50)
        assert (bench.freed, bench.calls.abandoned) == ([TimedOut], 0)

    on_loop(body)


def test_a_thread_that_is_late_is_abandoned_until_it_returns() -> None:
    hold = threading.Event()

    def late() -> Any:
        hold.wait()
        return later()  # a coroutine that nobody awaits any more

    async def body(bench: Bench) -> None:
        with pytest.raises(TimedOut):
            await bench.run(late, 0.02)
        await bench.free.wait()
        assert (bench.abandoned, bench.calls.abandoned) == ([1], 1)
        assert await bench.run(lambda: 3) == 3, "others have a thread of their own"
        hold.set()
        while bench.calls.abandoned:
            await asyncio.sleep(0.001)
        assert bench.freed == [TimedOut, 3]

    with_threads(body)


# --- cancelled callers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [None, 0.05])
def test_a_thread_behind_a_cancelled_caller_keeps_its_slot_until_it_ends_or_its_time_is_over(
    timeout_s: float | None,
) -> None:
    hold = threading.Event()

    def late() -> Any:
        hold.wait()
        return later()

    async def body(bench: Bench) -> None:
        call = bench.run(late, timeout_s)
        await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.sleep(0.01)
        if timeout_s != 0.05:
            assert bench.freed == []
            hold.set()
        await bench.free.wait()
        assert bench.freed == [asyncio.CancelledError]
        assert bench.abandoned == [1] * (timeout_s == 0.05)
        hold.set()
        while bench.calls.abandoned:
            await asyncio.sleep(0.001)

    with_threads(body)


# --- any order of events -------------------------------------------------------------------------------------

TIMES = st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0, 3.0])
ENDINGS: dict[str, type[BaseException]] = {
    "raises": ValueError,
    "cancels": asyncio.CancelledError,
    "exits": SystemExit,
}


@dataclass(frozen=True)
class Plan:
    """What one call does, and when its caller is cancelled."""

    threaded: bool
    seconds: float
    ending: str
    stubborn: bool
    timeout_s: float | None
    cancel_at: float | None

    def ends(self) -> int:
        if self.ending != "returns":
            raise ENDINGS[self.ending]
        return 1

    async def later(self) -> int:
        await (stubborn(self.seconds) if self.stubborn else asyncio.sleep(self.seconds))
        return self.ends()


plans = st.builds(
    Plan,
    threaded=st.booleans(),
    seconds=TIMES,
    ending=st.sampled_from(["returns", *ENDINGS]),
    stubborn=st.booleans(),
    timeout_s=st.none() | TIMES,
    cancel_at=st.none() | TIMES,
)


class JumpingThreads:
    """Threads of a loop whose clock jumps: each takes the seconds of its plan."""

    def start(self, function: Callable[..., Any], keywords: Any) -> asyncio.Future[Any]:
        loop, plan = asyncio.get_running_loop(), function.__self__  # type: ignore[attr-defined]
        future = loop.create_future()
        error = None if plan.ending == "returns" else ENDINGS[plan.ending]
        if error is None:
            loop.call_later(plan.seconds, future.set_result, 1)
        else:
            loop.call_later(plan.seconds, future.set_exception, error() if error is ValueError else UserExit())
        return future

    def close(self) -> None: ...


@given(st.lists(plans, min_size=1, max_size=8))
def test_in_any_order_each_call_has_one_outcome_and_frees_its_slot_once(some: list[Plan]) -> None:
    async def body(bench: Bench) -> None:
        with mock.patch.object(bench.calls, "_threads", JumpingThreads()):
            started = []
            for plan in some:
                freed: list[Any] = []
                function = plan.ends if plan.threaded else plan.later
                on_free = lambda *how, freed=freed: freed.append(how)  # noqa: E731
                call = asyncio.create_task(bench.calls.run(function, {}, plan.timeout_s, on_free))
                if plan.cancel_at is not None:
                    asyncio.get_running_loop().call_later(plan.cancel_at, call.cancel)
                started.append((plan, call, freed))
            await asyncio.sleep(30)
            for plan, call, freed in started:
                assert call.done()
                assert len(freed) == 1 or (call.cancelled() and plan.cancel_at == 0), "unless it never began"
                assert not call.cancelled() or plan.cancel_at is not None
                if not call.cancelled():
                    error = call.exception()
                    assert isinstance(error, TimedOut | ValueError | UserExit | None)
                    assert plan.timeout_s is not None or not isinstance(error, TimedOut)
            assert bench.calls.abandoned == 0, "all have ended"
            assert not timers()

    run_virtual(lambda: body(Bench()))


# --- threads and close ---------------------------------------------------------------------------------------


def test_close_ends_all_tasks_and_does_not_wait_for_ever_for_a_stubborn_one() -> None:
    async def body(bench: Bench) -> None:
        calls = [bench.run(partial(asyncio.sleep, 100)), bench.run(stubborn)]
        await asyncio.sleep(0.1)
        await bench.calls.close()
        assert asyncio.get_running_loop().time() < 5
        assert bench.freed == [UserExit]
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(end) for end in ends] == [UserExit, str]

    on_loop(body)


@pytest.mark.heavy
def test_a_process_exits_though_a_thread_never_returns() -> None:
    code = """
        import asyncio, threading
        from dataflow.usercode.calls import Calls

        async def main():
            calls = Calls(lambda count: print("abandoned", count))
            for timeout_s in (0.05, None):
                free = asyncio.Event()
                run = calls.run(threading.Event().wait, {}, timeout_s, lambda *_: free.set())
                call = asyncio.create_task(run)
            await asyncio.sleep(0.2)
            call.cancel()
            await calls.close()

        asyncio.run(main())
        print("out")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (0, "abandoned 1\nout\n"), done.stderr
