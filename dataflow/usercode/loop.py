"""The event loop that user code shares with the run, which must not end it."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Coroutine
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

from dataflow.usercode.failures import Contained


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


user_code: contextvars.ContextVar[tuple[CallMarker | None, bytes] | None] = contextvars.ContextVar(
    "dataflow_user_code", default=None
)
"""In the context of user code: what marks it, and its mark."""


call_endpoint: contextvars.ContextVar[str] = contextvars.ContextVar("dataflow_call_endpoint", default="")
"""In the context of an async call: the endpoint that was chosen for it when it started."""


class Lookout(asyncio.Task[None]):
    """A task that is cancelled when its loop ends, with all others; user code that cancels all tasks cannot cancel it.

    Args:
        loop: on which it runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(self._wait(), loop=loop)

    async def _wait(self) -> None:
        await self.get_loop().create_future()

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancels it, unless user code asks for that; returns whether it does."""
        return user_code.get() is None and super().cancel(msg)


def protect(loop: asyncio.AbstractEventLoop) -> None:
    """Keeps user code from ending a loop: by SystemExit in a task that it starts, or by ``stop()``.

    A loop with a task factory of its own is left as it is.
    """
    if loop.get_task_factory() is not None:
        return
    loop.set_task_factory(_task)
    stop = loop.stop

    def stop_unless_user_code_asks() -> None:
        if user_code.get() is not None:
            raise RuntimeError("the event loop belongs to the run, so that user code may not stop it")
        stop()

    with suppress(AttributeError):  # uvloop's takes no attributes
        loop.stop = stop_unless_user_code_asks  # type: ignore[method-assign]


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Task factory of the loop."""
    context = options.get("context")
    call = user_code.get() if context is None else context.get(user_code)
    wrapped = coroutine
    if call is not None and inspect.iscoroutine(coroutine):
        sentinel, mark = call
        wrapped = Contained(coroutine) if sentinel is None else sentinel.stepped(Contained(coroutine), mark)
    return asyncio.Task(wrapped, loop=loop, **options)
