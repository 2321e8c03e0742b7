"""Toolbox: the tools of a run, their descriptions in the prompt, and their calls; loaded in each process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import DataError, ModelError, an
from dataflow.models.chat import without
from dataflow.models.tokenizer import load_chat_tokenizer, prompt_ids
from dataflow.system.frozen import frozen_exit
from dataflow.tools.reader import AUTO, Answers, Format, Reader, ToolCall, find_format, find_reader
from dataflow.tools.tool import Refused, Tool, choose_tools
from dataflow.usercode.calls import Calls
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import TimedOut, message_of
from dataflow.usercode.load import load_file

T = TypeVar("T")
FROZEN_S = 60.0
"""Least default of ``tools.frozen_after``: an engine in the same process may keep Python's lock for some seconds."""
_ANSWER = "dataflow-answer"  # a text that no template changes


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run. Only these settings are pickled; the engine's process loads the tools itself.

    They are those of :class:`~dataflow.config.tools.ToolsConfig`; ``options`` are the chat template's.
    """

    model: str | None = None
    path: str | None = None
    names: tuple[str, ...] = ()
    timeout: float | None = 10.0
    format: str = AUTO
    frozen_after: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    longest: int = 4096
    side: str = "middle"

    def __reduce__(self) -> Any:
        # Another process cannot import the user's module by name, and may have another working directory.
        path = str(Path(self.path).expanduser().absolute()) if self.path else None
        return Toolbox, tuple(path if each.name == "path" else getattr(self, each.name) for each in fields(self))

    def check(self) -> Toolbox:
        """Loads the tools and the format, so that errors show before the run starts; returns itself."""
        _ = self.tools, self.how
        return self

    @cached_property
    def _module(self) -> ModuleType | None:
        return load_file(self.path, self._where) if self.path else None

    @property
    def _where(self) -> str:
        return f"tools.path={self.path}" if self.path else "tools.names"

    @cached_property
    def tools(self) -> dict[str, Tool]:
        return choose_tools(self._module, self.names, self._where)

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas that describe the tools to the model."""
        return [tool.schema for tool in self.tools.values()]

    @cached_property
    def how(self) -> Format | str:
        return find_format(self.format, self._module, f"tools.format={self.format}")

    @cached_property
    def tokenizer(self) -> Any:
        if self.model is None:
            raise ModelError("the tools have no tokenizer; set model.path.")
        return load_chat_tokenizer(self.model, self.options)

    @cached_property
    def reader(self) -> Reader:
        """Raises a ModelError if the tokenizer does not fit the format, or the chat template frames no answer."""
        reader = find_reader(self.how, self.tokenizer, self.schemas, self.options)
        before = prompt_ids(self.tokenizer, [{"role": "user", "content": "?"}], self.schemas)
        frame = reader.framed(before, self.tokenizer.encode("So"), [(ToolCall("tool"), _ANSWER)])
        if not hasattr(self.how, "frame") and _ANSWER not in self.tokenizer.decode(frame):
            what = "the chat template leaves out messages of role 'tool'"
            raise ModelError(f"model.path={self.model}: {what}; give the model one that has them.")
        return reader

    def check_rows(self, prompts: Batch) -> None:
        """Raises a DataError if the ``tools_kwargs`` of a prompt do not fit the tools; see :attr:`reader`, too."""
        _ = self.reader
        extras = prompts["extra_info"] if "extra_info" in prompts else [None] * len(prompts)
        for group, extra in zip(prompts.ids, extras, strict=True):
            given = tools_kwargs(extra)
            for name, tool in self.tools.items():
                tool.check_own(given.get(name, {}), f"rollout: extra_info of group {group}")

    def read(self, before: Sequence[int], turn: Sequence[int], called: bool = True) -> tuple[str, list[ToolCall]]:
        """Returns the text of a turn of the model, which was sampled after the tokens ``before``, and its calls."""
        text = str(self.tokenizer.decode(list(turn), skip_special_tokens=True))
        return text, self.reader.calls(before, turn) if called else []

    def framed(self, before: Sequence[int], turn: Sequence[int], answers: Answers) -> list[int]:
        """Returns the tokens between a turn and the model's next one; see :meth:`Reader.framed`."""
        return self.reader.framed(before, turn, [(call, without(text, self._tags)) for call, text in answers])

    @cached_property
    def _tags(self) -> list[str]:
        """Special tokens, and what else has a token of its own as a tag: a tool cannot end its own frame."""
        tokenizer = self.tokenizer
        added = [text for text in tokenizer.get_added_vocab() if text[:1] in "<[" and text[-1:] in ">]"]
        return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ToolCaller]:
        """Yields a caller of the tools; calls that still run at the end are cancelled."""
        after_s = max(FROZEN_S, self.timeout or 0.0) if self.frozen_after is None else self.frozen_after
        fix = "call it in a process of its own, with a time-out (subprocess)"
        watch = frozen_exit(after_s, "a tool", "tools.frozen_after", fix)  # None in the run's own process
        if watch is not None:
            watch.start()
        caller = ToolCaller(self)
        try:
            yield caller
        finally:
            await caller.close()
            if watch is not None:
                watch.close()


class ToolCaller:
    """Calls tools on the running event loop, sync ones in threads."""

    def __init__(self, box: Toolbox) -> None:
        self.box = box
        self._calls = Calls(self._on_abandoned)
        self._thread = ThreadPoolExecutor(1, "dataflow-tools")

    def state(self, extra_info: Any) -> ToolState:
        """Returns the tools in a conversation, from its row's ``extra_info``."""
        return ToolState(self, extra_info)

    async def run(self, function: Any, keywords: Mapping[str, Any]) -> Any:
        """Calls a tool within its time-out."""
        return await self._calls.run(function, keywords, self.box.timeout)

    async def apart(self, function: Callable[..., T], *arguments: Any) -> T:
        """Calls a function in the thread of the tokenizer, which keeps a long text off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def close(self) -> None:
        """Cancels all calls; threads end by themselves."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._calls.close()

    def _on_abandoned(self, count: int) -> None:
        logger.warning(f"{count} abandoned tool calls are still running; nothing can stop them.")


class ToolState:
    """The tools in one conversation: the sample's arguments by tool, and the instance of each class."""

    def __init__(self, caller: ToolCaller, extra_info: Any) -> None:
        self._caller, self._kwargs = caller, tools_kwargs(extra_info)
        self._instances: dict[str, asyncio.Future[Any]] = {}

    async def answer(self, call: ToolCall) -> tuple[str, bool]:
        """Calls a tool; returns the text for the model, and whether it is an error, as that of a failed call."""
        box, failed = self._caller.box, True
        try:
            result = await self._result(call, box.tools)
            text, failed = await self._caller.apart(_text, result), False
        except Refused as error:
            text = f"error: {error}"
        except TimedOut as error:
            text = f"error: {call.name}: {error}"
        except Exception as error:
            message = message_of(error)
            text = f"error: {type(error).__name__}{': ' + message if message else ''}"
        return cut(text, box.longest, box.side), failed

    async def _result(self, call: ToolCall, tools: Mapping[str, Tool]) -> Any:
        if call.error is not None:
            raise Refused(call.error)
        if call.name not in tools:
            raise Refused(f"there is no tool '{call.name}'; there is {', '.join(tools)}")
        tool, run = tools[call.name], self._caller.run
        # A format may return one object for equal calls, and the samples of a group share one row.
        arguments, own = own_copy(tool.arguments(call.arguments)), own_copy(self._kwargs.get(tool.name, {}))
        if not isinstance(tool.target, type):
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

    async def close(self) -> None:
        """Closes the instances."""
        for instance in self._instances.values():
            if not instance.done():
                instance.cancel()
            elif not instance.cancelled() and instance.exception() is None and hasattr(instance.result(), "close"):
                try:
                    await self._caller.run(instance.result().close, {})
                except Exception as error:
                    logger.warning(f"A tool's close failed: {type(error).__name__}: {message_of(error)}")


def cut(text: str, longest: int, side: str) -> str:
    """Returns a text without its middle, left or right side if it is longer, with a note of that in its place.

    >>> cut("abcdefgh", 4, "middle")
    'ab\\n[4 of 8 characters are left out here]\\ngh'
    """
    gone = len(text) - longest
    if gone <= 0:
        return text
    head = {"left": 0, "middle": longest // 2, "right": longest}[side]
    note = f"[{gone} of {len(text)} characters are left out here]"
    return "\n".join(part for part in (text[:head], note, text[head + gone :]) if part)


def tools_kwargs(extra_info: Any) -> dict[str, dict[str, Any]]:
    """Returns the ``tools_kwargs`` of a sample's ``extra_info``: the keywords of each tool, by its name."""
    found = (extra_info or {}).get("tools_kwargs") or {}
    for name, given in found.items():
        if not isinstance(given, Mapping | None):
            kind = an(type(given).__name__)
            raise DataError(f"extra_info: tools_kwargs of '{name}' is {kind}; give {{keyword: value}}.")
    # Parquet gives every row the keys of all rows, and None for those that a row does not have.
    return {
        name: {key: value for key, value in given.items() if value is not None}
        for name, given in found.items()
        if given is not None
    }


def _text(result: Any) -> str:
    """Returns a tool's result as the model reads it: a text as it is, all else as JSON."""
    if isinstance(result, str):
        return result
    return "" if result is None else json.dumps(result, ensure_ascii=False, default=str)


def toolbox_of(config: Any) -> Toolbox:
    """Returns the tools that a run of this :class:`~dataflow.config.run.RunConfig` offers."""
    offer = config.tools
    how = offer.timeout, offer.format, offer.frozen_after, config.data.apply_chat_template_kwargs
    cut = offer.max_tool_response_length, offer.tool_response_truncate_side
    return Toolbox(config.model.path, offer.path, tuple(offer.names), *how, *cut)
