"""Calls of user code: each is reported once and frees its slot once, whatever the code does."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable, Generator
from typing import Any

import pytest

from dataflow.usercode.calls import Call
from dataflow.usercode.threads import Threads
from tests.rigs.virtual_time import run_virtual
from tests.usercode.call_bench import Bench, Ends, Slow, coroutine, run, stubborn

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]


# --- what it returned or raised ------------------------------------------------------------------------------


class Later:
    """A callable object whose call is async."""

    async def __call__(self, x: int = 1) -> int:
        await asyncio.sleep(0)
        return x


class Handmade:
    """Awaitable, but no coroutine."""

    def __await__(self) -> Generator[Any, Any, int]:
        yield from asyncio.sleep(0).__await__()
        return 3


def test_every_kind_of_function_returns() -> None:
    in_thread: list[str] = []

    def plain() -> int:
        in_thread.append(threading.current_thread().name)
        return 3

    async def body(bench: Bench) -> None:
        for function in (coroutine, plain, lambda: coroutine(), Handmade, lambda: Handmade()):
            ends = await bench.end_of(function)
            assert (ends.results, ends.errors) == ([3], [None])
            assert ends.once == (1, 1)
            assert ends.told_first
        _call, ends = bench.start(Later(), x=5)
        await ends.free.wait()
        assert ends.results == [5]
        assert not bench.calls.live
        assert bench.bugs == []

    run(body)
    assert in_thread[0].startswith("reward-")


def test_a_call_knows_when_it_began_and_how_long_it_took() -> None:
    async def body(bench: Bench) -> None:
        call, ends = bench.start(lambda: asyncio.sleep(0.02))
        assert not call.ended
        await ends.free.wait()
        assert call.ended
        assert call.seconds >= 0.02
        assert call.begin > 1e9, "seconds of time.time()"

    run(body)


class Own(BaseException):
    """What a library may raise past all handlers of Exception."""


@pytest.mark.parametrize("waits", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(
    "error",
    [
        ValueError("no"),
        SystemExit(3),
        asyncio.CancelledError("mine"),
        GeneratorExit(),
        Own("mine"),
        TimeoutError(),
        StopAsyncIteration(),
        BaseExceptionGroup("several", [Own()]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_is_raised_belongs_to_who_asked(error: BaseException, waits: bool) -> None:
    async def later() -> None:
        raise error

    def now() -> None:
        raise error

    async def body(bench: Bench) -> None:
        ends = await bench.end_of(later if waits else now)
        assert [type(e) for e in ends.errors] == [type(error)]
        assert ends.results == [None]
        assert ends.once == (1, 1)

    run(body)


def test_stop_iteration_wakes_whoever_waits() -> None:
    def now() -> None:
        raise StopIteration(1)

    async def later() -> None:
        raise StopIteration(1)

    async def body(bench: Bench) -> None:
        (error,) = (await bench.end_of(now)).errors
        assert isinstance(error, StopIteration)
        (error,) = (await bench.end_of(later)).errors
        assert isinstance(error, RuntimeError), "Python's own translation within a coroutine"

    run(body)


def test_keyboard_interrupt_in_a_thread_is_an_error_of_that_call() -> None:
    def now() -> None:
        raise KeyboardInterrupt

    async def body(bench: Bench) -> None:
        (error,) = (await bench.end_of(now)).errors
        assert isinstance(error, KeyboardInterrupt)
        assert (await bench.end_of(coroutine)).results == [3], "the thread and the loop still run"

    run(body)


@pytest.mark.parametrize("function", [coroutine, lambda: 1], ids=["async", "sync"])
def test_arguments_it_does_not_take_are_an_error_that_comes_later(function: Any) -> None:
    async def body(bench: Bench) -> None:
        _call, ends = bench.start(function, wrong=1)
        assert ends.once == (0, 0), "not from within start: who starts it is not ready for an end"
        await ends.free.wait()
        assert isinstance(ends.errors[0], TypeError)
        assert ends.once == (1, 1)

    run(body)


def test_a_function_that_cancels_its_own_task_is_told_of() -> None:
    async def suicide() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(10)

    async def body(bench: Bench) -> None:
        (error,) = (await bench.end_of(suicide)).errors
        assert isinstance(error, asyncio.CancelledError)

    run(body)


def test_the_end_of_the_loop_is_no_end_of_a_call() -> None:
    """Who leaves asyncio.run without close() must not read that the reward function failed."""
    told: list[Call] = []

    async def body() -> None:
        bench = Bench()
        for function in (Slow(), lambda: asyncio.sleep(100)):
            bench.calls.start(function, {}, on_done=told.append, on_freed=lambda _call: None)
        await asyncio.sleep(0.05)

    asyncio.run(body())
    assert told == []


def test_a_function_that_cancels_all_tasks_ends_the_other_calls_with_an_error() -> None:
    async def hostile(spared: set[Any]) -> None:
        await asyncio.sleep(0.01)
        for task in asyncio.all_tasks() - spared - {asyncio.current_task()}:
            task.cancel()

    async def body() -> None:
        spared = asyncio.all_tasks()
        bench, ended = Bench(), asyncio.Queue[Call]()
        for function in (lambda: asyncio.sleep(100), lambda: hostile(spared)):
            bench.calls.start(function, {}, on_done=ended.put_nowait, on_freed=lambda _call: None)
        errors = [(await ended.get()).error for _ in range(2)]
        assert sorted(type(error).__name__ for error in errors) == ["CancelledError", "NoneType"]
        await bench.calls.close()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_what_claims_to_be_async_and_is_not_is_an_error() -> None:
    async def body(bench: Bench) -> None:
        ends = Ends()
        bench.calls.start(lambda: 3, {}, on_done=ends.on_done, on_freed=ends.on_freed, awaits=True)
        await ends.free.wait()
        assert isinstance(ends.errors[0], TypeError)

    run(body)


def test_a_thread_that_cannot_be_started_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    called: list[int] = []

    async def body(bench: Bench) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            _call, ends = bench.start(lambda: called.append(1))
            await ends.free.wait()
        assert "can't start new thread" in str(ends.errors[0])
        assert ends.once == (1, 1)
        assert not bench.calls.live
        assert (await bench.end_of(lambda: 3)).results == [3], "as soon as there are threads again"
        assert called == [], "who failed is not called behind the back of who asked"

    run(body)


# --- callbacks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["done", "freed"])
@pytest.mark.parametrize("function", [coroutine, lambda: 3], ids=["async", "sync"])
def test_an_error_in_who_is_told_is_reported_and_loses_no_slot(place: str, function: Any) -> None:
    async def body(bench: Bench) -> None:
        ends = Ends()

        def broken(call: Call) -> None:
            (ends.on_done if place == "done" else ends.on_freed)(call)
            raise KeyError("ours")

        done, freed = (broken, ends.on_freed) if place == "done" else (ends.on_done, broken)
        bench.calls.start(function, {}, on_done=done, on_freed=freed)
        await ends.free.wait()
        assert ends.once == (1, 1)
        assert [type(bug) for bug in bench.bugs] == [KeyError]
        assert not bench.calls.live

    run(body)


def test_close_with_everything_in_flight() -> None:
    hold = threading.Event()

    async def body(bench: Bench) -> None:
        started = [
            bench.start(Slow(), 60.0),
            bench.start(Slow()),
            bench.start(lambda: asyncio.sleep(100), 60.0),
            bench.start(hold.wait, 60.0),
            bench.start(coroutine, wrong=1),
        ]
        await asyncio.sleep(0.02)
        started.append(bench.start(Slow()))  # cancelled before it began
        await bench.calls.close()
        for i, (call, ends) in enumerate(started):
            assert ends.freed == (0 if i == 3 else 1)
            assert call.ended == (i != 3)
            assert len(ends.errors) == (1 if i == 4 else 0)
        assert bench.calls.live == {started[3][0]}, "a thread cannot be ended"
        hold.set()
        await started[3][1].free.wait()

    run(body)


def test_close_does_not_wait_for_ever_for_a_stubborn_coroutine() -> None:
    async def body() -> None:
        bench, loop = Bench(), asyncio.get_running_loop()
        _call, ends = bench.start(stubborn)
        _late, late = bench.start(stubborn, 1.0)
        await late.free.wait()
        begin = loop.time()
        await bench.calls.close(deadline_s=5.0)
        assert loop.time() - begin == pytest.approx(5.0, abs=1e-3)
        assert ends.once == (0, 1)
        assert bench.calls.abandoned == 2
        await asyncio.sleep(60)
        assert bench.calls.abandoned == 0

    run_virtual(body)


def test_threads_are_used_again_and_end_with_close() -> None:
    async def body(bench: Bench) -> None:
        before = set(threading.enumerate())
        for _ in range(50):
            await bench.end_of(lambda: 1)
        workers = set(threading.enumerate()) - before
        assert len(workers) == 1, "one after the other needs one"
        await bench.calls.close()
        for worker in workers:
            await asyncio.to_thread(worker.join, 10)
            assert not worker.is_alive()

    run(body)


def test_a_thread_can_be_waited_for_as_soon_as_it_is_asked_for() -> None:
    for _ in range(50):
        threads, before = Threads(), set(threading.enumerate())
        threads.run(lambda: lambda: None)
        (worker,) = set(threading.enumerate()) - before
        threads.close()
        worker.join(10)
        assert not worker.is_alive()


def test_threads_run_as_many_at_once_as_are_asked_for() -> None:
    threads, barrier = Threads(), threading.Barrier(17)

    def meet() -> Callable[[], None]:
        barrier.wait(timeout=20)
        return lambda: None

    for _ in range(16):
        threads.run(meet)
    meet()
    threads.close()


def test_an_idle_thread_keeps_nothing_of_its_last_call() -> None:
    import weakref

    class Sample:
        pass

    async def body(bench: Bench) -> None:
        sample = Sample()
        gone = weakref.ref(sample)
        _call, ends = bench.start(lambda of: 1, of=sample)
        await ends.free.wait()
        await bench.end_of(lambda: 1)
        del sample, _call, ends
        gc.collect()
        assert gone() is None

    run(body)


def test_a_process_exits_though_a_thread_never_returns() -> None:
    code = """
        import asyncio, sys, threading
        from dataflow.usercode.calls import Calls

        async def main():
            free = asyncio.Event()
            calls = Calls(lambda strays: print("strays", strays), print)
            calls.start(threading.Event().wait, {}, on_done=lambda c: print(c.error), on_freed=lambda c: free.set(),
                        timeout_s=0.05)
            calls.start(threading.Event().wait, {}, on_done=print, on_freed=print)
            await free.wait()
            await calls.close()

        asyncio.run(main())
        print("out")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split("\n")[:3] == ["no answer within 0.05 s", "strays 1", "out"]


def test_a_thread_that_returns_after_the_loop_is_closed_says_nothing() -> None:
    hold = threading.Event()
    failures: list[Any] = []

    def late() -> Any:
        hold.wait()
        return coroutine()

    async def body() -> None:
        bench = Bench()
        bench.start(late)
        await bench.calls.close()

    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            before = set(threading.enumerate())
            asyncio.run(body())
            (worker,) = set(threading.enumerate()) - before
            hold.set()
            worker.join(10)
            gc.collect()
    finally:
        threading.excepthook = hook
    assert not failures
    assert not [str(w.message) for w in caught if "never" in str(w.message)]
