"""Calls of user code with time-outs, cancellation and slots that hold whatever the code does.

An async function runs as a task, a sync one in a daemon thread, so neither keeps the process alive. ``on_done`` is
called exactly once: when the call has returned, raised or timed out. ``on_freed`` is called exactly once: when the code
has ended, or when the call is abandoned because its code keeps running although it timed out or was cancelled.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from loguru import logger

from dataflow.system import clock
from dataflow.usercode.failures import TimedOut, is_interrupt
from dataflow.usercode.load import is_async
from dataflow.usercode.loop import Lookout, call_endpoint, protect, user_code
from dataflow.usercode.threads import OnIdle, Threads

REMIND_S = 600.0
"""Seconds after which a call without a time-out that is still running is logged; then twice as many, and so on."""
GRACE_S = 1.0
"""Seconds that a cancelled task may take to end before its call is abandoned."""

OnCall: TypeAlias = Callable[["Call"], None]


class Call:
    """One running call.

    Attributes:
        result: what the code returned.
        error: what it raised, a :class:`TimedOut`, or a CancelledError; None if it returned.
        begin: when it began, in seconds of ``clock.now()``.
        seconds: how long it took.
        ended: whether the code has ended.
        endpoint: which was chosen for it, see :data:`~dataflow.usercode.loop.call_endpoint`.
    """

    __slots__ = (
        "_abandoned",
        "_awaited",
        "_calls",
        "_clock",
        "_on_done",
        "_on_freed",
        "_task",
        "_timer",
        "begin",
        "ended",
        "endpoint",
        "error",
        "result",
        "seconds",
    )

    def __init__(self, calls: Calls, on_done: OnCall, on_freed: OnCall, endpoint: str = "") -> None:
        self._calls = calls
        self.endpoint = endpoint
        self._on_done: OnCall | None = on_done
        self._on_freed: OnCall | None = on_freed
        self._awaited: Awaitable[Any] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._abandoned = False
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self.begin = clock.now()
        self._clock = time.perf_counter()
        self.seconds = 0.0

    def cancel(self) -> None:
        """Cancels the call: ``on_done`` is not called. A thread keeps its slot until it returns or times out."""
        if self.ended:
            return
        if self._on_done is not None:
            self._on_done, self.error = None, asyncio.CancelledError()
        if self._task is not None:
            self._stop(self._task)

    def _stop(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        if not self._abandoned:
            self._alarm(GRACE_S, self._abandon)

    def _alarm(self, seconds: float, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._calls.loop.call_later(seconds, then)

    def expire(self, limit_s: float) -> None:
        """Ends the call with a :class:`TimedOut`."""
        self._report(None, TimedOut(f"no answer within {limit_s:g} s"))
        if self._task is None:
            self._abandon()
        else:
            self._stop(self._task)

    def _abandon(self) -> None:
        self._timer = None
        self._abandoned = True
        self._calls.abandoned += 1
        self._free()
        self._calls.guarded(self._calls.on_abandoned, self._calls.abandoned)

    def _report(self, result: Any, error: BaseException | None) -> None:
        self.seconds = time.perf_counter() - self._clock
        on_done, self._on_done = self._on_done, None
        if on_done is not None:
            self.result, self.error = result, error
            self._calls.guarded(on_done, self)

    def _free(self) -> None:
        on_freed, self._on_freed = self._on_freed, None
        if on_freed is not None:
            self._calls.guarded(on_freed, self)

    def _end(self, result: Any, error: BaseException | None) -> None:
        """Records that the code has ended, in time or not."""
        self.ended = True
        self._task = self._awaited = None  # the call itself stays referenced until its time-out
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._calls.live.discard(self)
        if self._abandoned:
            self._calls.abandoned -= 1
        self._report(result, error)
        self._free()

    def _cancelled(self, _task: asyncio.Task[Any]) -> None:
        _discard(self._awaited)  # it may not have been started
        if self._calls.loop_ends():
            self._on_done = None  # not a failure of the user's code
        self._end(None, asyncio.CancelledError())

    def _thread_ended(self, result: Any, error: BaseException | None) -> None:
        if self._on_done is None:
            _discard(result)
        elif error is None and inspect.isawaitable(result):
            self._await(result)  # a sync function returned a coroutine: run it on the loop
            return
        self._end(result, error)

    def _await(self, awaitable: Awaitable[Any]) -> None:
        self._awaited = awaitable
        # In a context of its own: the end of one call starts the next, which must not see its variables.
        # Not through the loop's task factory: _run() catches what must not escape from this task.
        context = self._calls.context.copy()
        if self.endpoint:
            context.run(call_endpoint.set, self.endpoint)
        self._task = asyncio.Task(self._run(awaitable), loop=self._calls.loop, context=context)
        self._task.add_done_callback(self._cancelled)

    async def _run(self, awaitable: Awaitable[Any]) -> None:
        """Awaits the user's code and reports its end from within the task, which saves an iteration of the loop."""
        result, error = None, None
        try:
            result = await awaitable
        except asyncio.CancelledError:
            raise
        except BaseException as raised:  # SystemExit or KeyboardInterrupt from a task would end the loop
            if is_interrupt(raised):
                raise
            error = raised
        assert self._task is not None
        self._task.remove_done_callback(self._cancelled)
        self._end(result, error)


def _discard(result: Any) -> None:
    """Closes a coroutine that will not be awaited, which avoids Python's warning."""
    if inspect.iscoroutine(result):
        result.close()


class Calls:
    """Starts calls on one event loop.

    Args:
        on_abandoned: called with the number of abandoned calls that still run, each time it increases.
        on_bug: called with an exception that a callback raised; otherwise its waiters would wait for ever.
    """

    def __init__(self, on_abandoned: Callable[[int], None], on_bug: Callable[[Exception], None]) -> None:
        self.loop = asyncio.get_running_loop()
        self.context = contextvars.copy_context()
        self.context.run(user_code.set, True)
        protect(self.loop)
        self.on_abandoned = on_abandoned
        self._on_bug = on_bug
        self.live: set[Call] = set()
        self.abandoned = 0
        self._threads = Threads()
        self._timeouts = Timeouts(self.loop)
        self._lookout = Lookout(self.loop)
        self._reminder: asyncio.TimerHandle | None = None

    def start(
        self,
        function: Callable[..., Any],
        keywords: Mapping[str, Any],
        *,
        on_done: OnCall,
        on_freed: OnCall,
        timeout_s: float | None = None,
        awaits: bool | None = None,
        endpoint: str = "",
    ) -> Call:
        """Calls ``function(**keywords)``; returns at once.

        Args:
            function: sync or async.
            keywords: its arguments.
            on_done: called when the function has returned, raised or timed out; not after ``cancel``.
            on_freed: called when the call's slot is free.
            timeout_s: None for no time-out.
            awaits: whether the function is async; None looks.
            endpoint: of the call, which an async function may look up.
        """
        call = Call(self, on_done, on_freed, endpoint)
        self.live.add(call)
        if timeout_s is not None:
            self._timeouts.add(call, timeout_s)
        elif self._reminder is None:
            self._reminder = self.loop.call_later(REMIND_S, self._remind, REMIND_S)
        try:
            if is_async(function) if awaits is None else awaits:
                call._await(function(**keywords))
            else:
                self._threads.run(lambda: self._in_thread(call, function, keywords))
        except BaseException as error:  # wrong arguments, or no thread can be started
            if is_interrupt(error):
                raise
            self.loop.call_soon(call._end, None, error)
        return call

    def _remind(self, seconds: float) -> None:
        """Logs that calls without a time-out have been running for ``seconds``, and looks again later."""
        self._reminder = None
        if not self.live:
            return
        now = time.perf_counter()
        count = sum(now - call._clock > seconds - 1 for call in self.live)  # the clocks may differ a little
        if count:
            logger.warning(
                f"Calls that have had no answer for {seconds / 60:.0f} minutes, and that no time-out ends: {count}. "
                "Set reward.timeout (or tools.timeout), or find out what delays them."
            )
            seconds *= 2
        self._reminder = self.loop.call_later(seconds / 2 if count else seconds, self._remind, seconds)

    def loop_ends(self) -> bool:
        """Whether all tasks are being cancelled, as asyncio.run does at its end."""
        return self._lookout.cancelling() > 0

    def guarded(self, callback: Callable[[Any], None], argument: Any) -> None:
        """Calls a callback; what it raises goes to ``on_bug``."""
        try:
            callback(argument)
        except Exception as error:
            self._on_bug(error)

    def _in_thread(self, call: Call, function: Callable[..., Any], keywords: Mapping[str, Any]) -> OnIdle:
        result, error = None, None
        try:
            result = function(**keywords)
        except BaseException as raised:  # reported to the caller; the thread takes the next call
            error = raised
        return partial(self._post, call, result, error)

    def _post(self, call: Call, result: Any, error: BaseException | None) -> None:
        try:
            self.loop.call_soon_threadsafe(call._thread_ended, result, error)
        except RuntimeError:  # the loop is closed, so there is no waiter
            _discard(result)

    async def close(self, deadline_s: float = 2.0) -> None:
        """Cancels the running calls and waits for their tasks; threads end by themselves."""
        for call in tuple(self.live):
            call.cancel()
        tasks = [call._task for call in self.live if call._task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=deadline_s)
        for call in self.live:
            if call._timer is not None:
                call._timer.cancel()
        self._timeouts.close()
        if self._reminder is not None:
            self._reminder.cancel()
        self._threads.close()
        self._lookout.cancel()


class Timeouts:
    """One timer per distinct time-out, as most calls finish early."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queues: dict[float, deque[tuple[float, Call]]] = {}
        self._timers: dict[float, asyncio.TimerHandle] = {}

    def add(self, call: Call, seconds: float) -> None:
        """Expires the call after ``seconds``, unless it has ended."""
        queue = self._queues.get(seconds)
        if queue is None:
            queue = self._queues[seconds] = deque()
        while queue and queue[0][1].ended:
            queue.popleft()
        queue.append((self._loop.time() + seconds, call))
        if seconds not in self._timers:
            self._timers[seconds] = self._loop.call_at(queue[0][0], self._sweep, seconds)

    def _sweep(self, seconds: float) -> None:
        queue = self._queues[seconds]
        now = self._loop.time()
        while queue and (queue[0][1].ended or queue[0][0] <= now):
            call = queue.popleft()[1]
            if not call.ended:
                call.expire(seconds)
        if queue:
            self._timers[seconds] = self._loop.call_at(queue[0][0], self._sweep, seconds)
        else:
            del self._timers[seconds], self._queues[seconds]

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._queues.clear()
