"""Calls tools: checks the model's request, calls the tool with a time-out, and returns its result as text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

from loguru import logger

from dataflow.cluster.frozen import FrozenExit
from dataflow.errors import DataError, an
from dataflow.tools.formats import ToolCall
from dataflow.tools.registry import Tool
from dataflow.usercode.calls import Calls
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import TimedOut, message_of

T = TypeVar("T")
LONGEST = 4096
"""Default of ``tools.max_tool_response_length``."""
Run: TypeAlias = Callable[[Any, Mapping[str, Any]], Awaitable[Any]]
"""Calls a function with keywords under the time-out: :meth:`ToolCaller.run`."""


class Answer(NamedTuple):
    """The result of a call: a text for the model, and whether it is an error."""

    text: str
    failed: bool = False


class ToolCaller:
    """Calls tools on the running event loop, sync ones in a thread.

    Args:
        tools: by name.
        timeout_s: seconds that a call may take; None for no limit.
        frozen_exit: ends this process when a call freezes it; None lets it hang.
        longest: characters of an answer.
        side: of a longer answer that is cut: left, middle or right.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        timeout_s: float | None,
        frozen_exit: FrozenExit | None = None,
        longest: int = LONGEST,
        side: str = "middle",
    ) -> None:
        self._tools = tools
        self._cut = partial(cut, longest=longest, side=side)
        self._thread = ThreadPoolExecutor(1, "dataflow-tools")
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._frozen_exit = frozen_exit
        if frozen_exit is not None:
            frozen_exit.start()
        self._calls = Calls(self._on_abandoned)

    def state(self, extra_info: Any) -> ToolState:
        """Returns the state of the tools in a conversation, from its row's ``extra_info``."""
        return ToolState(own_copy(tools_kwargs(extra_info)))  # the samples of a group share one row

    async def answer(self, call: ToolCall, state: ToolState) -> Answer:
        """Calls a tool and returns the text for the model; a failure of the call is such a text, too.

        Args:
            call: the model's request.
            state: of the tools in the model's conversation.
        """
        try:
            return Answer(self._cut(await self._called(call, state)))
        except _Failed as failed:
            return Answer(self._cut(f"error: {failed}"), failed=True)

    async def _called(self, call: ToolCall, state: ToolState) -> str:
        if call.error is not None:
            raise _Failed(call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            raise _Failed(f"there is no tool '{call.name}'; there is {', '.join(self._tools)}")
        try:
            arguments = tool.arguments(call.arguments)
        except ValueError as error:
            raise _Failed(str(error)) from error
        try:
            result = await state.call(tool, arguments, self.run)
        except TimedOut as error:
            raise _Failed(f"{call.name}: {error}") from error
        if type(result) is str:
            return result
        try:
            # In a thread and under the time-out: it may be large, or of any type, whose methods may raise.
            return str(await self.run(_text, {"result": result}))
        except (TimedOut, _Failed) as error:
            raise _Failed(f"the result of {call.name} cannot be read: {error}") from error

    async def apart(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the thread of the tokenizer, which keeps a long text off the event loop."""
        return await self._loop.run_in_executor(self._thread, function, *arguments)

    async def run(self, function: Any, keywords: Mapping[str, Any]) -> Any:
        """Calls user code.

        Raises:
            TimedOut: it took too long.
            _Failed: it raised.
        """
        try:
            return await self._calls.run(function, keywords, self._timeout_s)
        except TimedOut:
            raise
        except Exception as error:
            text = message_of(error)
            raise _Failed(f"{type(error).__name__}{': ' + text if text else ''}") from error

    async def close(self) -> None:
        """Cancels all calls; threads cannot be stopped and end by themselves."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._calls.close()
        if self._frozen_exit is not None:
            self._frozen_exit.close()

    def _on_abandoned(self, count: int) -> None:
        logger.warning(f"{count} abandoned tool calls are still running; nothing can stop them.")


class ToolState:
    """The state of the tools in one conversation: its ``tools_kwargs``, and the instance of each class.

    Args:
        kwargs: keywords of each tool, by its name.
    """

    def __init__(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        self._kwargs = kwargs
        self._instances: dict[str, asyncio.Future[Any]] = {}

    async def call(self, tool: Tool, arguments: Mapping[str, Any], run: Run) -> Any:
        """Calls a tool through ``run``."""
        # A format may return one object for equal calls, and a function may change its arguments.
        own, arguments = own_copy(self._kwargs.get(tool.name, {})), own_copy(dict(arguments))
        if not tool.is_class:
            return await run(tool.target, {**arguments, **own})
        if tool.name not in self._instances:
            # Two calls of one turn run concurrently and must get the same instance.
            self._instances[tool.name] = asyncio.ensure_future(run(tool.target, own))
        try:
            instance = await asyncio.shield(self._instances[tool.name])
        except Exception:
            self._instances.pop(tool.name, None)  # the next call tries again
            raise
        return await run(instance, arguments)

    async def close(self, run: Run) -> int:
        """Closes the instances; returns how many failed to close."""
        failed = 0
        for instance in self._instances.values():
            if not instance.done():
                instance.cancel()
                continue
            if instance.cancelled() or instance.exception() is not None:
                continue
            close = getattr(instance.result(), "close", None)
            if callable(close):
                try:
                    await run(close, {})
                except (TimedOut, _Failed) as error:
                    failed += 1
                    logger.warning(f"A tool's close failed: {error}")
        return failed


class _Failed(Exception):
    """A call failed, with a message for the model."""


def cut(text: str, longest: int, side: str) -> str:
    """Returns a text without its middle, left or right side if it is longer, with a note of that in its place.

    >>> cut("abcdefgh", 4, "middle")
    'ab\n[4 of 8 characters are left out here]\ngh'
    """
    gone = len(text) - longest
    if gone <= 0:
        return text
    head = {"left": 0, "middle": longest // 2, "right": longest}[side]
    note = f"[{gone} of {len(text)} characters are left out here]"
    return "\n".join(part for part in (text[:head], note, text[head + gone :]) if part)


def tools_kwargs(extra_info: Any) -> dict[str, dict[str, Any]]:
    """Returns the ``tools_kwargs`` of a sample's ``extra_info``: the keywords of each tool, by its name.

    Parquet gives every row the keys of all rows, so None means that a keyword was not given.

    Raises:
        DataError: it is not a mapping of mappings.
    """
    found = (extra_info or {}).get("tools_kwargs") or {}
    if not isinstance(found, Mapping):
        raise DataError(f"extra_info: tools_kwargs is {an(type(found).__name__)}; give {{tool's name: {{...}}}}.")
    kwargs: dict[str, dict[str, Any]] = {}
    for name, given in found.items():
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise DataError(
                f"extra_info: tools_kwargs of '{name}' is {an(type(given).__name__)}; give {{keyword: value}}."
            )
        kwargs[name] = {key: value for key, value in given.items() if value is not None}
    return kwargs


def _text(result: Any) -> str:
    """Returns a tool's result as the model reads it: a text as it is, all else as JSON."""
    if isinstance(result, str):
        return result
    return "" if result is None else json.dumps(result, ensure_ascii=False, default=str)
