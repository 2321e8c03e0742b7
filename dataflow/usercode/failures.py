"""Exceptions of user code: what of them is shown, which are the run's own, and how they reach another process."""

from __future__ import annotations

import asyncio
import pickle
import threading
import traceback
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from dataflow.errors import RunError
from dataflow.system.secrets import redact

LONGEST = 2000
"""Characters of a message that are kept."""

LONGEST_TRACE = 40_000
"""Characters of a traceback that are kept."""


class UserExit(RunError):
    """Replaces an exception that would end the process, such as SystemExit, and names it."""


class TimedOut(TimeoutError):
    """A call exceeded its time-out; the message is what it did not give, such as "no answer within 5 s"."""

    fix = "raise reward.timeout, or find out what delays the call"


def message_of(error: BaseException) -> str:
    """Returns the message of an exception on one line, shortened and without secrets."""
    text = str(error)
    line = encodable(redact(" ".join(text[: 2 * LONGEST].split())))
    whole = len(text) <= 2 * LONGEST and len(line) <= LONGEST
    return line if whole else f"{line[:LONGEST]}... ({len(text):,} characters)"


def named(error: BaseException) -> str:
    """Returns the type of an exception and its message, if it has one; see :func:`message_of`."""
    return f"{type(error).__name__}: {message_of(error)}".rstrip(": ")


def trace_of(error: BaseException) -> str:
    """Returns the traceback of an exception and its causes, shortened and without secrets."""
    return shortened(redact(encodable("".join(traceback.format_exception(error)))))


def encodable(text: str) -> str:
    """Returns a text with lone surrogates escaped: no process can write them, and Ray ends a worker that tries to.

    >>> encodable("caf\\udce9.json")
    'caf\\\\udce9.json'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(trace: str) -> str:
    """Returns a traceback; without its middle if it is longer than :data:`LONGEST_TRACE`."""
    half = LONGEST_TRACE // 2
    return trace if len(trace) <= LONGEST_TRACE else f"{trace[:half]}\n...\n{trace[-half:]}"


def parts_of(error: BaseException) -> list[BaseException]:
    """Returns the exceptions in an exception group, at any depth, in order; of any other exception a list of itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [part for each in error.exceptions for part in parts_of(each)]


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception, its cause, and so on; each once, even if the chain is circular."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception is a Ctrl-C, which ends the run: Python raises it in the main thread alone."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def is_cancelled(error: BaseException) -> bool:
    """Whether the current task is being cancelled, and ``error`` is not a CancelledError raised by user code."""
    if not isinstance(error, asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and task.cancelling() > 0


def is_ours(error: BaseException) -> bool:
    """Whether an exception from user code must propagate: an interrupt of the run, or the task's cancellation."""
    return is_interrupt(error) or is_cancelled(error)


async def contained(awaitable: Awaitable[Any]) -> Any:
    """Awaits user code that runs as a task; what is no Exception becomes a UserExit, as it would end the event loop."""
    try:
        return await awaitable
    except (Exception, asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise
        raise UserExit(named(error)) from error


def pickled_error(error: BaseException, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes | None:
    """Returns a pickled exception for another process; None if it must be replaced.

    That is the case if unpickling does not restore its class, or if it may not be raised in a coroutine.
    """
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        return None
    try:
        sent = dumps(error)
        return sent if type(pickle.loads(sent)) is type(error) else None
    except Exception:  # whatever its own way of pickling raises
        return None
