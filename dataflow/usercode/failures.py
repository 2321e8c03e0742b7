"""Exceptions from user code: reads them safely, tells them from interrupts of the run, pickles them.

An exception may be hostile: its ``__str__`` may raise or be endless, its attributes may be properties that raise, and
it need not be an ``Exception``. All code that inspects one uses these functions.
"""

from __future__ import annotations

import asyncio
import pickle
import signal
import threading
import traceback
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any

from dataflow.errors import RunError
from dataflow.system.secrets import redact
from dataflow.system.stopping import stopping

LONGEST = 2000
"""Characters of a message that are kept."""

LONGEST_TRACE = 40_000
"""Characters of a traceback that are kept."""

_READ = 100_000  # characters of a message that are examined
_MOST_BYTES = 1 << 20  # of a pickled exception


# Python's own descriptors; a class may override them with properties.
_DEFINED = {name: BaseException.__dict__[name] for name in ("__cause__", "__context__", "__traceback__", "__dict__")}
_PARTS = BaseExceptionGroup.__dict__["exceptions"]


class UserExit(RunError):
    """Replaces an exception that would end the process, such as SystemExit, and names it."""


class Unreadable(RunError):
    """Replaces an exception that cannot be read, and names its class."""


class TimedOut(TimeoutError):
    """A call exceeded its time-out; the message is what it did not give, such as "no answer within 5 s"."""

    fix = "raise reward.timeout, or find out what delays the call"


def readable(error: BaseException, chained: bool = True) -> BaseException:
    """Returns the exception if its class, causes and parts can be read, else an :class:`Unreadable`.

    A class may override the attributes of exceptions with properties that raise or never end.

    Args:
        error: the exception.
        chained: whether to check its causes and contexts as well.
    """
    ahead, seen = [error], set[int]()
    try:
        while ahead:
            one = ahead.pop()
            if id(one) in seen:
                continue
            seen.add(id(one))
            if one.__class__ is not type(one) or not type(one).__name__ or not type(one).__mro__:
                raise AttributeError("__class__")
            for name, defined in _DEFINED.items():
                if getattr(one, name) is not defined.__get__(one):
                    raise AttributeError(name)
            if isinstance(one, BaseExceptionGroup):
                if one.exceptions is not _PARTS.__get__(one):
                    raise AttributeError("exceptions")
                ahead += one.exceptions
            if chained:
                ahead += [other for other in (one.__cause__, one.__context__) if other is not None]
    except BaseException as own:
        if is_interrupt(own):
            raise
        name = type.__dict__["__name__"].__get__(type(error))
        return Unreadable(f"{name}, which cannot be read")
    return error


def attempt(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[Any, BaseException | None]:
    """Calls a sync function of the user's; returns its result, and the exception that it raised, made readable.

    What the caller raises then has no unreadable exception as its context, which an ``except`` block would set.
    """
    try:
        return function(*arguments, **keywords), None
    except BaseException as raised:
        if is_ours(raised):
            raise
        error = raised
    return None, readable(error)


def message_of(error: BaseException) -> str:
    """Returns the message of an exception on one line, shortened; or the error that its ``__str__`` raises."""
    try:
        text = str(error)
        size, head = str.__len__(text), str.__getitem__(text, slice(_READ))  # it may be a subclass of str
    except BaseException as own:
        if is_interrupt(own):
            raise
        return f"its __str__ raised {type(own).__name__}"
    line = encodable(redact(" ".join(head.split())))
    size = size if size > _READ else len(line)
    return line if size <= LONGEST else f"{line[:LONGEST]}... ({size:,} characters)"


def named(error: BaseException) -> str:
    """Returns the type of an exception and its message, if it has one; see :func:`message_of`."""
    return f"{type(error).__name__}: {message_of(error)}".rstrip(": ")


def trace_of(error: BaseException) -> str:
    """Returns the traceback of an exception and its causes, shortened; of an unreadable one the frames."""
    try:
        text = "".join(traceback.format_exception(error))
    except BaseException as own:  # formatting reads attributes of the exception and its causes
        if is_interrupt(own):
            raise
        text = f"{''.join(traceback.format_tb(error.__traceback__))}{type(error).__name__}: {message_of(error)}\n"
    return shortened(redact(encodable(text)))


def encodable(text: str) -> str:
    """Returns a text with lone surrogates escaped: no process can write them, and Ray ends a worker that tries to.

    >>> encodable("caf\\udce9.json")
    'caf\\\\udce9.json'
    """
    return text.encode("utf-8", "backslashreplace").decode()


def can_be_traced(error: BaseException) -> bool:
    """Whether the traceback of an exception and its causes can be formatted and encoded, and their messages be read."""
    try:
        for one in causes_of(error):
            str(one)  # traceback accepts an exception whose __str__ raises, which Ray does not
        return bool("".join(traceback.format_exception(error)).encode())
    except BaseException as own:
        if is_interrupt(own):
            raise
        return False


def shortened(trace: str) -> str:
    """Returns a traceback; without its middle if it is longer than :data:`LONGEST_TRACE`."""
    half = LONGEST_TRACE // 2
    return trace if len(trace) <= LONGEST_TRACE else f"{trace[:half]}\n...\n{trace[-half:]}"


def attribute_of(error: object, name: str, default: Any = None) -> Any:
    """Returns an attribute of a user's object; the default if it is missing or its property raises."""
    try:
        return getattr(error, name, default)
    except BaseException as own:
        if is_interrupt(own):
            raise
        return default


def parts_of(error: BaseException) -> list[BaseException]:
    """Returns the exceptions in an exception group, at any depth, in order; of any other exception a list of itself."""
    found: list[BaseException] = []
    left = [error]
    while left:
        one = left.pop()
        if isinstance(one, BaseExceptionGroup):
            left.extend(reversed(one.exceptions))
        else:
            found.append(one)
    return found


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yields an exception, its cause, and so on; each once, even if the chain is circular."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__


def is_interrupt(error: BaseException) -> bool:
    """Whether an exception is a real Ctrl-C and not a KeyboardInterrupt raised by user code.

    A real one occurs in the main thread only: if the run's own handler has received a signal, or if Python's or
    asyncio's handler of SIGINT is installed.
    """
    # By type: isinstance() also reads __class__, which the exception may override.
    if not issubclass(type(error), KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return False
    if stopping.stops or signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_name == "_on_sigint"  # of asyncio.Runner


def is_cancelled(error: BaseException) -> bool:
    """Whether the current task is being cancelled, and ``error`` is not a CancelledError raised by user code."""
    if not issubclass(type(error), asyncio.CancelledError):
        return False
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return False
    return task is not None and task.cancelling() > 0


def is_ours(error: BaseException) -> bool:
    """Whether an exception from user code must propagate: an interrupt of the run, or the task's cancellation."""
    return is_interrupt(error) or is_cancelled(error)


class Contained(Coroutine[Any, Any, Any]):
    """Wraps a coroutine of user code that runs as a task, where SystemExit would end the event loop.

    SystemExit and KeyboardInterrupt become a :class:`UserExit`.
    """

    __slots__ = ("_inner",)

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise self._instead(error) from error

    def throw(self, *raised: Any) -> Any:
        try:
            return self._inner.throw(*raised)
        except (SystemExit, KeyboardInterrupt) as error:
            raise self._instead(error) from error

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def _instead(self, error: BaseException) -> BaseException:
        if is_interrupt(error):
            raise error
        return UserExit(named(error))


def pickled_error(error: BaseException, dumps: Callable[[Any], bytes] = pickle.dumps) -> bytes | None:
    """Returns a pickled exception for another process; None if it must be replaced.

    That is the case if unpickling does not restore its class, if it is larger than 1 MiB, or if it may not be raised
    in a coroutine.
    """
    if not isinstance(error, Exception) or isinstance(error, StopIteration | StopAsyncIteration):
        return None
    try:
        sent = dumps(error)
        whole = len(sent) <= _MOST_BYTES and type(pickle.loads(sent)) is type(error)
    except BaseException as own:  # pickling runs user code
        if is_interrupt(own):
            raise
        return None
    return sent if whole else None
