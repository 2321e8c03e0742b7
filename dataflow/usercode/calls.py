"""Calls of user code that end when they should, whatever the code does.

An async function runs as a task, a sync one in a daemon thread, so that neither keeps the process. A call is told
of exactly once: it returned, it raised, or its time is over. It gives up its slot exactly once: when its code has
ended, or when it is abandoned as a stray, a call that goes on although nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol, TypeAlias

from dataflow.system import clock
from dataflow.system.redaction import redact_error
from dataflow.usercode.failures import Contained, is_interrupt, readable
from dataflow.usercode.load import is_async
from dataflow.usercode.threads import Tell, Threads
from dataflow.usercode.watchdog import Watchdog

GRACE_S = 1.0
"""What a task that was cancelled may take to end before it counts as a stray."""

Told: TypeAlias = Callable[["Call"], None]


class CallMarker(Protocol):
    """Records which user code runs at the moment, such as the sentinel of a reward agent."""

    def mark(self, kind: int, step: int | str, group: int, sample: int = -1, key: bytes | None = None) -> bytes:
        """Returns the mark of a call: its kind and the sample, or the group if ``sample`` is -1, that it is for."""
        ...

    def inside(self, mark: bytes) -> AbstractContextManager[None]:
        """Enters the call with this mark for the duration of a block."""
        ...

    def enter(self, mark: bytes, /) -> None:
        """The current thread enters the call with this mark."""
        ...

    def leave(self) -> None:
        """The current thread leaves its call."""
        ...

    def stepped(self, coroutine: Coroutine[Any, Any, Any], mark: bytes, /) -> Coroutine[Any, Any, Any]:
        """Returns the coroutine, with each of its steps marked."""
        ...


class TimedOut(TimeoutError):
    """A call took longer than it may."""

    fix = "raise reward.timeout, or see what holds the call up"


class Call:
    """One running call.

    Attributes:
        result: what the code returned.
        error: what it raised, a :class:`TimedOut`, or a CancelledError; None if it returned.
        begin: seconds of ``clock.now()``.
        seconds: how long it took.
        ended: whether its code is over.
    """

    __slots__ = (
        "_awaited",
        "_clock",
        "_done",
        "_freed",
        "_mark",
        "_owner",
        "_stray",
        "_task",
        "_timer",
        "begin",
        "ended",
        "error",
        "result",
        "seconds",
    )

    def __init__(self, owner: Calls, done: Told, freed: Told, mark: bytes | None = None) -> None:
        self._owner = owner
        self._mark = mark
        self._done: Told | None = done
        self._freed: Told | None = freed
        self._awaited: Awaitable[Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stray = False
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.begin = clock.now()
        self._clock = time.perf_counter()
        self.seconds = 0.0

    def cancel(self) -> None:
        """Nobody wants the answer any more. A thread keeps its slot until it returns or its time is over."""
        if self.ended:
            return
        if self._done is not None:
            self._done, self.error = None, asyncio.CancelledError()
        if self._task is not None:
            self._stop(self._task)

    def _stop(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        if not self._stray:
            self._alarm(GRACE_S, self._abandon)

    def _alarm(self, seconds: float, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._owner.loop.call_later(seconds, then)

    def expire(self, limit_s: float) -> None:
        """Its time is over."""
        self._tell(None, TimedOut(f"no answer within {limit_s:g} s"))
        if self._task is None:
            self._abandon()
        else:
            self._stop(self._task)

    def _abandon(self) -> None:
        self._timer = None
        self._stray = True
        self._owner.strays += 1
        self._free()
        self._owner.guarded(self._owner.on_stray, self._owner.strays)

    def _tell(self, result: Any, error: BaseException | None) -> None:
        self.seconds = time.perf_counter() - self._clock
        done, self._done = self._done, None
        if done is not None:
            if error is not None:
                error = readable(error)
                redact_error(error)  # its text is shown, logged and journaled
            self.result, self.error = result, error
            self._owner.guarded(done, self)

    def _free(self) -> None:
        freed, self._freed = self._freed, None
        if freed is not None:
            self._owner.guarded(freed, self)

    def _ended(self, result: Any, error: BaseException | None) -> None:
        """The code is over, in time or not."""
        self.ended = True
        self._task = self._awaited = None  # the call itself is kept as long as its time-out
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._owner.live.discard(self)
        if self._stray:
            self._owner.strays -= 1
        self._tell(result, error)
        self._free()

    def _cancelled(self, _task: asyncio.Task[Any]) -> None:
        _discard(self._awaited)  # it may never have begun
        if self._owner.loop_ends():
            self._done = None  # no failure of the user's code, which may well cancel its own task
        self._ended(None, asyncio.CancelledError())

    def _thread_ended(self, result: Any, error: BaseException | None) -> None:
        if self._done is None:
            _discard(result)
        elif error is None and inspect.isawaitable(result):
            self._await(result)  # a sync function that made a coroutine, which belongs on the loop
            return
        self._ended(result, error)

    def _await(self, awaitable: Awaitable[Any]) -> None:
        self._awaited = awaitable
        # A context of its own: what ends in one call starts the next, which must not see its variables.
        # Not by the loop's factory: what may leave this task is caught in it.
        context, running = self._owner.context.copy(), self._run(awaitable)
        sentinel, mark = self._owner.sentinel, self._mark
        marked: Any = running
        if sentinel is not None and mark is not None:
            marked = sentinel.stepped(running, mark)
            context.run(_user_code.set, (sentinel, mark))
        self._task = asyncio.Task(marked, loop=self._owner.loop, context=context)
        self._task.add_done_callback(self._cancelled)

    async def _run(self, awaitable: Awaitable[Any]) -> None:
        """Tells of the end from within the task: a callback would cost the loop one more turn."""
        result, error = None, None
        try:
            result = await awaitable
        except asyncio.CancelledError:
            raise
        except BaseException as raised:  # a task that raises SystemExit or KeyboardInterrupt would end the loop with it
            if is_interrupt(raised):
                raise
            error = raised
        assert self._task is not None
        self._task.remove_done_callback(self._cancelled)
        self._ended(result, error)


_user_code: contextvars.ContextVar[tuple[CallMarker | None, bytes] | None] = contextvars.ContextVar(
    "dataflow_user_code", default=None
)


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Makes a task; one that user code starts cannot end the loop with it."""
    context = options.get("context")
    users = _user_code.get() if context is None else context.get(_user_code)
    wrapped = coroutine
    if users is not None and inspect.iscoroutine(coroutine):
        sentinel, mark = users
        wrapped = Contained(coroutine) if sentinel is None else sentinel.stepped(Contained(coroutine), mark)
    return asyncio.Task(wrapped, loop=loop, **options)


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()


def _discard(result: Any) -> None:
    """Closes a coroutine that nobody will await: Python would complain about it."""
    if inspect.iscoroutine(result):
        result.close()


class Calls:
    """Starts calls on one event loop.

    Args:
        on_stray: told how many strays there are, each time one more is abandoned.
        on_bug: told of an error in whoever was told of an end, who would otherwise be waited for in vain.
        sentinel: records the calls that are running.
    """

    def __init__(
        self,
        on_stray: Callable[[int], None],
        on_bug: Callable[[Exception], None],
        sentinel: CallMarker | None = None,
    ) -> None:
        self.sentinel = sentinel
        self._begin = time.perf_counter()
        self.loop = asyncio.get_running_loop()
        self.context = contextvars.copy_context()
        self.context.run(_user_code.set, (None, b""))
        if self.loop.get_task_factory() is None:
            self.loop.set_task_factory(_task)
        self.on_stray = on_stray
        self._on_bug = on_bug
        self.live: set[Call] = set()
        self.strays = 0
        self._threads = Threads()
        self._timeouts = Timeouts(self.loop)
        self._lookout = self.loop.create_task(_for_ever())
        self._watchdog = Watchdog(self.loop, self.live, within=Call._run.__code__)

    def start(
        self,
        function: Callable[..., Any],
        keywords: Mapping[str, Any],
        *,
        done: Told,
        freed: Told,
        timeout_s: float | None = None,
        waits: bool | None = None,
        mark: bytes | None = None,
    ) -> Call:
        """Calls ``function(**keywords)``; returns at once.

        Args:
            function: sync or async.
            keywords: its arguments.
            done: told when it returned, raised or ran out of time; not after ``cancel``.
            freed: told when the call's slot is free.
            timeout_s: None lets it take as long as it does.
            waits: whether the function is async, where that is known.
            mark: what the sentinel is to know of the call.
        """
        call = Call(self, done, freed, mark)
        self.live.add(call)
        if timeout_s is not None:
            self._timeouts.add(call, timeout_s)
        try:
            if is_async(function) if waits is None else waits:
                self._watchdog.look()
                call._await(function(**keywords))
            else:
                self._threads.run(lambda: self._in_thread(call, function, keywords))
        except BaseException as error:  # it does not take these arguments, or there is no thread for it
            if is_interrupt(error):
                raise
            self.loop.call_soon(call._ended, None, error)
        return call

    def loop_ends(self) -> bool:
        """Whether all tasks have been cancelled, as asyncio.run does when its coroutine is over."""
        return self._lookout.cancelling() > 0

    def guarded(self, told: Callable[[Any], None], what: Any) -> None:
        """Tells of an end."""
        try:
            told(what)
        except Exception as error:
            self._on_bug(error)

    def _in_thread(self, call: Call, function: Callable[..., Any], keywords: Mapping[str, Any]) -> Tell:
        result, error = None, None
        sentinel, mark = self.sentinel, call._mark
        if sentinel is not None and mark is not None:
            sentinel.enter(mark)
        try:
            result = function(**keywords)
        except BaseException as raised:  # whatever user code raises belongs to whoever asked, not to the thread
            error = raised
        if sentinel is not None and mark is not None:
            sentinel.leave()
        return partial(self._post, call, result, error)

    def _post(self, call: Call, result: Any, error: BaseException | None) -> None:
        try:
            self.loop.call_soon_threadsafe(call._thread_ended, result, error)
        except RuntimeError:  # the loop is closed: whoever waited is gone with it
            _discard(result)

    def since_s(self, *, all_of_them: bool) -> float | None:
        """Returns how long ago the oldest call that goes on began, or the first of all; None if there is none."""
        now = time.perf_counter()
        if all_of_them:
            return now - self._begin
        return max((now - call._clock for call in self.live), default=None)

    async def close(self, deadline_s: float = 2.0) -> None:
        """Cancels what runs and waits for the tasks; threads are left to end by themselves."""
        for call in tuple(self.live):
            call.cancel()
        tasks = [call._task for call in self.live if call._task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=deadline_s)
        for call in self.live:
            if call._timer is not None:
                call._timer.cancel()
        self._timeouts.close()
        self._watchdog.close()
        self._threads.close()
        self._lookout.cancel()


class Timeouts:
    """The time-outs of calls, most of which have the same and end long before it: a timer each would cost more."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lines: dict[float, deque[tuple[float, Call]]] = {}
        self._timers: dict[float, asyncio.TimerHandle] = {}

    def add(self, call: Call, seconds: float) -> None:
        """Lets the call expire in so many seconds, if it has not ended by then."""
        line = self._lines.get(seconds)
        if line is None:
            line = self._lines[seconds] = deque()
        while line and line[0][1].ended:
            line.popleft()
        line.append((self._loop.time() + seconds, call))
        if seconds not in self._timers:
            self._timers[seconds] = self._loop.call_at(line[0][0], self._sweep, seconds)

    def _sweep(self, seconds: float) -> None:
        line = self._lines[seconds]
        now = self._loop.time()
        while line and (line[0][1].ended or line[0][0] <= now):
            call = line.popleft()[1]
            if not call.ended:
                call.expire(seconds)
        if line:
            self._timers[seconds] = self._loop.call_at(line[0][0], self._sweep, seconds)
        else:
            del self._timers[seconds], self._lines[seconds]

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._lines.clear()
