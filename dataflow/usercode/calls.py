"""Runs user code, sync or async, under a time-out. Code that does not end is abandoned: nothing waits for it.

An async function runs as a task, a sync one in a daemon thread. A task that swallows its cancellation, or a thread that
never returns, keeps neither its slot nor the process alive; it is counted, as it may still use a service.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from dataflow.usercode.failures import TimedOut, UserExit, contained, named
from dataflow.usercode.load import is_async

GRACE_S = 1.0
"""Seconds that a cancelled task may take to end before it is abandoned."""
_CLOSE_S = 2.0

OnFree: TypeAlias = Callable[[Any, BaseException | None], None]


class NoThread(RuntimeError):
    """The system cannot start another thread for a sync function."""

    fix = "lower reward.concurrency, make the function async, or raise the limit on threads (ulimit -u)"
    retry = True


class Calls:
    """Runs user code on one event loop.

    Args:
        on_abandoned: called with the number of abandoned calls that still run, each time it increases.
    """

    def __init__(self, on_abandoned: Callable[[int], None] | None = None) -> None:
        self._on_abandoned = on_abandoned
        self._threads = _Threads()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._abandoned: set[asyncio.Future[Any]] = set()

    @property
    def abandoned(self) -> int:
        """Number of abandoned calls that still run."""
        return len(self._abandoned)

    async def run(
        self,
        function: Callable[..., Any],
        keywords: Mapping[str, Any],
        timeout_s: float | None = None,
        on_free: OnFree | None = None,
    ) -> Any:
        """Returns what ``function(**keywords)`` returns, or what the awaitable that it returns does.

        Args:
            function: sync or async.
            keywords: its arguments.
            timeout_s: None for no limit.
            on_free: called once with the result and the error, when the code has ended or is abandoned; after a
                time-out or a cancellation this may come after the end of this call.

        Raises:
            TimedOut: the code did not end in time.
            Exception: what the code raised; a UserExit for what is no Exception, and for a cancellation of its own.
        """
        loop = asyncio.get_running_loop()
        ends_at = math.inf if timeout_s is None else loop.time() + timeout_s
        code: asyncio.Future[Any] | None = None
        result = error = None
        try:
            if is_async(function):
                result = function(**keywords)
            else:
                code = self._threads.start(function, keywords)
                result = await _ended(code, timeout_s, ends_at)
            while inspect.isawaitable(result):
                code = loop.create_task(contained(result))
                self._tasks.add(code)
                code.add_done_callback(self._tasks.discard)
                if inspect.iscoroutine(result):  # a task that is cancelled before it began has not awaited it
                    code.add_done_callback(partial(_close, result))
                result = await _ended(code, timeout_s, ends_at)
            return result
        except BaseException as raised:
            error = raised
            raise
        finally:
            on_free = on_free or _nothing
            if code is None or (code.done() and not isinstance(error, asyncio.CancelledError)):
                on_free(result, error)
            elif code.done():
                on_free(*_outcome(code))
            elif isinstance(code, asyncio.Task):
                code.cancel()
                self._leave(code, GRACE_S, on_free, error)
            else:  # a cancelled thread cannot be stopped: it keeps its slot until its time-out, and no longer after one
                self._leave(code, max(0.0, ends_at - loop.time()), on_free, error)

    def _leave(
        self, code: asyncio.Future[Any], patience_s: float, on_free: OnFree, error: BaseException | None
    ) -> None:
        """Frees a slot when its code ends, or after some seconds, from which on the code counts as abandoned."""

        def abandon() -> None:
            self._abandoned.add(code)
            on_free(None, error)
            if self._on_abandoned is not None:
                self._on_abandoned(len(self._abandoned))

        def ended(_code: asyncio.Future[Any]) -> None:
            outcome = _outcome(code)
            if code not in self._abandoned:
                on_free(*((None, error) if isinstance(error, TimedOut) else outcome))
            self._abandoned.discard(code)
            if timer is not None:
                timer.cancel()

        loop = asyncio.get_running_loop()
        timer = None if patience_s == math.inf else loop.call_later(patience_s, abandon)
        code.add_done_callback(ended)

    async def close(self) -> None:
        """Cancels the tasks and waits some seconds for them; threads end by themselves."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_S)
        self._threads.close()


async def _ended(code: asyncio.Future[Any], timeout_s: float | None, ends_at: float) -> Any:
    """Returns the result of code; neither its time-out nor a cancellation of the waiting task ends the code."""
    left_s = None if timeout_s is None else max(0.0, ends_at - asyncio.get_running_loop().time())
    if not (await asyncio.wait((code,), timeout=left_s))[0]:
        raise TimedOut(f"no answer within {timeout_s:g} s")
    if code.cancelled():  # by its own code: here it would look like a cancellation of the request
        raise UserExit("CancelledError") from asyncio.CancelledError()
    return code.result()


def _outcome(code: asyncio.Future[Any]) -> tuple[Any, BaseException | None]:
    """Returns result and error of code that has ended and that nobody waits for any more."""
    if code.cancelled():
        return None, asyncio.CancelledError()
    if (error := code.exception()) is not None:
        return None, error
    if inspect.iscoroutine(result := code.result()):  # of a sync function; nobody awaits it, which Python would log
        result.close()
        return None, asyncio.CancelledError()
    return result, None


def _close(coroutine: Any, _task: asyncio.Future[Any]) -> None:
    coroutine.close()


def _nothing(_result: Any, _error: BaseException | None) -> None: ...


class _Threads:
    """Daemon threads. Those of ThreadPoolExecutor are joined at exit, even if they never return."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._count = self._idle = 0

    def start(self, function: Callable[..., Any], keywords: Mapping[str, Any]) -> asyncio.Future[Any]:
        """Calls a function in an idle or a new thread; NoThread if none can be started."""
        loop = asyncio.get_running_loop()
        if self._idle:
            self._idle -= 1
        else:
            try:
                threading.Thread(target=self._work, name=f"user-code-{self._count + 1}", daemon=True).start()
            except RuntimeError as error:
                raise NoThread(str(error)) from error
            self._count += 1
        future = loop.create_future()
        self._jobs.put((loop, future, function, keywords))
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            loop, future, function, keywords = job
            result = error = None
            try:
                result = function(**keywords)
            except Exception as raised:
                error = RuntimeError(named(raised)) if isinstance(raised, StopIteration) else raised
            except BaseException as raised:
                error = UserExit(named(raised))
                error.__cause__ = raised
            with suppress(RuntimeError):  # the loop is closed: nobody waits
                loop.call_soon_threadsafe(self._end, future, result, error)
            del job, loop, future, function, keywords, result, error  # an idle thread keeps no samples alive

    def _end(self, future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
        self._idle += 1
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def close(self) -> None:
        """Ends each thread when it becomes idle."""
        for _ in range(self._count):
            self._jobs.put(None)
