"""What comes back of a call to an actor: its answer, what its function raised, or that its process is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dataflow.errors import RunError, ToolLost

DIED = "the process that ran it died (killed, or out of memory)"


async def first_failure(refs: Sequence[Any]) -> list[Any]:
    """Waits for all refs, but no longer than until the first fails: its fellow ranks may hang in a collective."""
    return list(await asyncio.gather(*(fetch(ref) for ref in refs)))


async def fetch(ref: Any) -> Any:
    """Waits for one ref."""
    return await ref


def died(error: BaseException | None) -> bool:
    """Whether a call failed because its tool is gone, with its process or by its own word (:class:`ToolLost`).

    Anything else that its function raised is no death.
    """
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):
        return isinstance(error.cause, ToolLost)
    gone = (
        exceptions.RayActorError,
        exceptions.OutOfMemoryError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, gone)


def cause(error: BaseException) -> BaseException:
    """Returns what the worker raised, out of Ray's wrapping; a dead process as one clear sentence."""
    from ray import exceptions

    wrapped = isinstance(error, exceptions.RayTaskError)
    if wrapped and isinstance(inner := getattr(error, "cause", None), BaseException):
        inner.add_note(str(error))
        return inner
    if died(error):
        return RunError(f"{DIED}; see Ray's log for its last words: {last_words(error)}")
    return error


def last_words(error: BaseException) -> str:
    """Returns the first line of what Ray, or the tool itself, says of a death."""
    said = getattr(error, "cause", None) or error
    return (str(said).strip().splitlines() or [type(said).__name__])[0]
