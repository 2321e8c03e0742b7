"""The event loop that user code shares with the run, which must not end it."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from contextlib import suppress
from typing import Any

from dataflow.usercode.failures import contained

user_code: contextvars.ContextVar[bool] = contextvars.ContextVar("dataflow_user_code", default=False)
"""Whether user code runs in this context."""


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
        return not user_code.get() and super().cancel(msg)


def protect(loop: asyncio.AbstractEventLoop) -> None:
    """Keeps user code from ending a loop: by SystemExit in a task that it starts, or by ``stop()``.

    A loop with a task factory of its own is left as it is.
    """
    if loop.get_task_factory() is not None:
        return
    loop.set_task_factory(_task)
    stop = loop.stop

    def stop_unless_user_code_asks() -> None:
        if user_code.get():
            raise RuntimeError("the event loop belongs to the run, so that user code may not stop it")
        stop()

    with suppress(AttributeError):  # uvloop's takes no attributes
        loop.stop = stop_unless_user_code_asks  # type: ignore[method-assign]


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
    """Task factory of the loop."""
    context = options.get("context")
    users = user_code.get() if context is None else context.get(user_code)
    wrapped = contained(coroutine) if users and inspect.iscoroutine(coroutine) else coroutine
    return asyncio.Task(wrapped, loop=loop, **options)
