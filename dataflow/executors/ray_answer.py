"""What comes back of a call to an actor: its answer, what its function raised, or that its process is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dataflow.errors import RunError

DIED = "the process that ran it died (killed, or out of memory)"


async def first_failure(refs: Sequence[Any]) -> list[Any]:
    """Waits for all refs, but no longer than until the first fails: its fellow ranks may hang in a collective."""
    return list(await asyncio.gather(*(fetch(ref) for ref in refs)))


async def fetch(ref: Any) -> Any:
    """Waits for one ref."""
    return await ref


def died(error: BaseException | None) -> bool:
    """Whether a call failed because its process is gone, not because its function raised."""
    from ray import exceptions

    gone = (
        exceptions.RayActorError,
        exceptions.OutOfMemoryError,
        exceptions.NodeDiedError,
        exceptions.WorkerCrashedError,
    )
    return isinstance(error, gone) and not isinstance(error, exceptions.RayTaskError)


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
    """Returns the first line of what Ray says of a death."""
    return str(error).strip().splitlines()[0]
