"""Outcomes of a call to an actor: its answer, the error that its function raised, or the death of its process."""

from __future__ import annotations

import asyncio
import functools
import re
import sysconfig
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import DataflowError, RunError, ServiceLost
from dataflow.usercode.failures import is_cancelled, message_of, named, pickled_error, shortened, trace_of
from dataflow.usercode.pickling import dumps

DIED = "the process that ran it died (killed, or out of memory)"
GONE = "a value that it needs is gone with the node that held it"
_IN_CREATION = "in its creation task"
"""How Ray's message says that an actor could not be made."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FRAMES = re.compile(r'^ *File "([^"]+)", line', re.MULTILINE)


def answering(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Wraps a method of an actor so that Ray can return what it raises; see :func:`answer_to`."""

    @functools.wraps(method)
    async def answer(*arguments: Any) -> Any:
        try:
            return await method(*arguments)
        except BaseException as error:
            instead = answer_to(error)
        raise instead  # outside of the handler, so that it has no context: Ray would inspect that

    return answer


def answer_to(error: BaseException) -> BaseException:
    """Returns the exception that an actor raises in place of one from user code.

    SystemExit would end the actor, and an exception that cannot be pickled would arrive as an error of Ray's; each
    becomes a RunError that names it.
    """
    if is_cancelled(error) or pickled_error(error, dumps) is not None:
        return error
    instead = RunError(named(error))
    instead.add_note(trace_of(error))
    return instead


async def first_failure(refs: Sequence[Any]) -> list[Any]:
    """Waits for all refs or for the first failure, as the other ranks may then hang in a collective."""
    return list(await asyncio.gather(*refs))


def died(error: BaseException) -> bool:
    """Whether a call failed because its service died.

    Its process or node ended, it raised :class:`ServiceLost`, or a rank lost its connection to another one, which says
    so before Ray knows of the death.
    """
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):
        return isinstance(error.cause, ServiceLost) or _peer_lost(error.cause)
    gone = (
        exceptions.RayActorError,
        exceptions.OutOfMemoryError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, gone)


def _peer_lost(inner: object) -> bool:
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    return bool(kinds & {"DistBackendError", "DistNetworkError"}) or "gloo/transport" in str(inner)


def cause(error: BaseException) -> BaseException:
    """Returns the worker's own exception without Ray's wrapping.

    For a dead process, or a value that is gone, a ServiceLost in one sentence: a run resumes from a checkpoint.
    """
    from ray import exceptions

    inner = error.cause if isinstance(error, exceptions.RayTaskError) else None
    if isinstance(inner if inner is not None else error, exceptions.ObjectLostError):
        return ServiceLost(GONE)
    if isinstance(inner, BaseException):
        if _peer_lost(inner):
            # The whole message: where NCCL itself fails, as without memory, its last line says why.
            return ServiceLost(f"the connection between its ranks failed: {message_of(inner)}")
        if trace := _trace(error, inner):
            inner.add_note(trace)
        return inner
    if died(error) and _IN_CREATION in str(error):
        return RunError(
            f"its process could not begin: {last_words(error)}; give all nodes the same Python environment."
        )
    if died(error):
        return ServiceLost(f"{DIED}; see Ray's log for its last output: {last_words(error)}")
    return error


def _trace(error: BaseException, inner: BaseException) -> str:
    """Returns Ray's traceback of a worker's exception; "" if that is a sentence of ours and no frame is the user's."""
    text = _COLOURS.sub("", str(error))
    packages = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    libraries = ("<frozen ", str(Path(__file__).parents[2]), *packages)
    if isinstance(inner, DataflowError) and all(file.startswith(libraries) for file in _FRAMES.findall(text)):
        return ""
    return shortened(text)


def last_words(error: BaseException) -> str:
    """Returns the line of the message of Ray, or of the service itself, that says why a process died."""
    shown = getattr(error, "cause", None) or error
    lines = str(shown).strip().splitlines() or [type(shown).__name__]
    # Of an actor that could not even be made, such as one without this package, the message has the traceback.
    return lines[-1].strip() if _IN_CREATION in lines[0] else lines[0]
