"""Toolbox: the tools of a run with the chat template that frames what they say, built anew in each process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from loguru import logger

from dataflow.batch import Batch
from dataflow.data.prompts import DESCRIBED, prompt_ids
from dataflow.errors import DataError, ModelError, nearest
from dataflow.tools.formats import Format, Framing, ToolCall, find_format
from dataflow.tools.registry import READY, Tool, choose_tools, marked_tools
from dataflow.usercode.calls import Call, Calls, TimedOut
from dataflow.usercode.copies import own_copy
from dataflow.usercode.failures import is_ours, message_of
from dataflow.usercode.load import load_file

# Content that no template changes, to find again in what it renders.
_SAID, _ANSWER = "dataflow-said", "dataflow-answer"


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run. It travels to the engine's process as these settings alone and is loaded there.

    Attributes:
        model: directory of the tokenizer, whose chat template frames the answers.
        path: file with the user's tools.
        names: tools to take; all marked ones of the file if empty.
        timeout: seconds that a call may take; None lets it take as long as it does.
        format: how the model writes its calls.
    """

    model: str | None = None
    path: str | None = None
    names: tuple[str, ...] = ()
    timeout: float | None = 10.0
    format: str = "hermes"

    def __getstate__(self) -> dict[str, Any]:
        # What has been loaded stays: a module of the user's has no name that another process could import, and that
        # process may stand in another directory.
        path = str(Path(self.path).expanduser().absolute()) if self.path else None
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "path": path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def check(self) -> Toolbox:
        """Loads the tools and the format, only to fail before the run does; returns itself.

        Raises:
            ConfigError: as of :func:`load_tools` and :func:`find_format`.
        """
        _ = self.tools, self.reader
        return self

    @cached_property
    def tools(self) -> dict[str, Tool]:
        return choose_tools(self._module, self.names, self._where)

    @cached_property
    def reader(self) -> Format:
        return find_format(self.format, self._module, f"tools.format={self.format}")

    @cached_property
    def _module(self) -> ModuleType | None:
        return load_file(self.path, self._where) if self.path else None

    @property
    def _where(self) -> str:
        return f"tools.path={self.path}" if self.path else "tools.names"

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """What the model is told of the tools."""
        return [tool.schema for tool in self.tools.values()]

    @cached_property
    def tokenizer(self) -> Any:
        from dataflow.data.prompts import load_tokenizer

        if self.model is None:
            raise ModelError("the tools have no tokenizer; set model.path.")
        return load_tokenizer(self.model)

    def described(self, prompts: Batch, longest: int | None = None) -> Batch:
        """Returns the prompts with the tools described in them, where the chat template does that.

        Args:
            prompts: columns ``prompt_ids`` and ``raw_prompt``.
            longest: tokens that one may then have.

        Raises:
            DataError: a prompt is too long then, or its ``tools_kwargs`` do not fit the tools.
        """
        extras = prompts["extra_info"] if "extra_info" in prompts else [None] * len(prompts)
        for group, extra in zip(prompts.ids, extras, strict=True):
            self._check_kwargs(kwargs_of(extra), f"rollout: extra_info of group {group}")
        if "raw_prompt" not in prompts or not self._shown or prompts.meta.get(DESCRIBED):
            return prompts
        ids = [prompt_ids(self.tokenizer, chat, self.schemas) for chat in prompts["raw_prompt"]]
        for group, prompt in zip(prompts.ids, ids, strict=True):
            if longest is not None and len(prompt) > longest:
                raise DataError(
                    f"rollout: with the tools described, the prompt of group {group} has {len(prompt)} tokens, more "
                    f"than data.max_prompt_length={longest}; raise it."
                )
        return prompts.merge(prompts.like(prompt_ids=ids))

    @cached_property
    def _shown(self) -> bool:
        """Whether the chat template tells the model of the tools."""
        chat = [{"role": "user", "content": _SAID}]
        shown = prompt_ids(self.tokenizer, chat, self.schemas) != prompt_ids(self.tokenizer, chat)
        if not shown:
            logger.info("The chat template takes no tools: the model knows of them only what its prompts say.")
        return shown

    def _check_kwargs(self, given: Mapping[str, Mapping[str, Any]], where: str) -> None:
        for name in given:
            if name not in self._known:
                raise DataError(f"{where}: tools_kwargs names '{name}', which is no tool{nearest(name, self._known)}.")
        for name, tool in self.tools.items():
            tool.check_own(given.get(name, {}), where)

    @cached_property
    def _known(self) -> dict[str, Any]:
        """All tools by name, those included that this run leaves out."""
        return {**READY, **marked_tools(self._module, self._where), **self.tools}

    def parse(self, tokens: Sequence[int]) -> list[ToolCall]:
        """Returns the calls in a turn of the model's."""
        return self.reader.parse(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def framed(self, turn: Sequence[int], answers: Sequence[tuple[str, str]]) -> list[int]:
        """Returns the tokens from the end of a turn to where the model goes on: the tools' answers in their frame.

        It is what the chat template renders behind the text of an assistant's message when messages of role ``tool``
        follow and the assistant is to speak. So the template must leave the assistant's text as it is and begin
        what follows with a special token: the answers are tokenised by themselves.

        Args:
            turn: the model's tokens; the frame begins with the token that ends a turn unless that one ended it.
            answers: name and answer of each call, in order.

        Raises:
            ModelError: the template cannot do that.
        """
        if isinstance(self.reader, Framing):
            text = self.reader.frame([self._harmless(text) for _, text in answers])
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        chat += [{"role": "tool", "name": name, "content": self._harmless(text)} for name, text in answers]
        ids: list[int] = self.tokenizer.encode(self._behind(chat), add_special_tokens=False)
        return ids[1:] if turn and ids and ids[0] == turn[-1] else ids

    def _behind(self, chat: list[dict[str, str]]) -> str:
        try:
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template raises what its author liked
            raise ModelError(f"{self._whose} cannot frame a tool's answer: {error}.") from error
        _before, found, behind = text.partition(_SAID)
        if not found:
            raise ModelError(f"{self._whose} does not show what the assistant said before a tool's answer.")
        return str(behind)

    @property
    def _whose(self) -> str:
        return f"model.path={self.model}: the chat template"

    @cached_property
    def _frames(self) -> None:
        """Sees, once, that the template shows a tool's answer at all."""
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        if _ANSWER not in self._behind([*chat, {"role": "tool", "name": "tool", "content": _ANSWER}]):
            raise ModelError(f"{self._whose} leaves out messages of role 'tool'; give the model one that has them.")

    def check_template(self) -> None:
        """Sees that the chat template can frame an answer.

        Raises:
            ModelError: it cannot, and the format does not do it either.
        """
        if not isinstance(self.reader, Framing):
            _ = self._frames

    def _harmless(self, text: str) -> str:
        """Returns it without what would be read as special tokens: a tool must not end its own frame."""
        return without(text, self.tokenizer.all_special_tokens)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Desk]:
        """Gives a desk that calls the tools; at the end, what still runs there is cancelled."""
        desk = Desk(self)
        try:
            yield desk
        finally:
            await desk.close()


def without(text: str, tokens: Sequence[str]) -> str:
    """Returns a text without these tokens, those too that arise as others go, in linear time.

    >>> without("a<e<end>nd>b", ["<end>"])
    'ab'
    """
    endings: dict[str, list[list[str]]] = {}
    for token in filter(None, tokens):
        endings.setdefault(token[-1], []).append(list(token))
    kept: list[str] = []
    for character in text:
        kept.append(character)
        for ending in endings.get(character, ()):
            if kept[-len(ending) :] == ending:
                del kept[-len(ending) :]
                break
    return "".join(kept)


def toolbox_of(config: Any) -> Toolbox:
    """Returns the tools that a run offers.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
    """
    offer = config.tools
    return Toolbox(config.model.path, offer.path, tuple(offer.names), offer.timeout, offer.format)


@dataclass(frozen=True)
class Answer:
    """What a call came to: a text for the model, and whether it is an error."""

    text: str
    failed: bool = False


class Desk:
    """Calls tools on the running event loop: a sync one in a thread, each under the time-out."""

    def __init__(self, box: Toolbox) -> None:
        self._box = box
        self._loop = asyncio.get_running_loop()
        self._calls = Calls(self._stray, self._bug)

    def own(self, extra_info: Any) -> Own:
        """Returns what a conversation has of the tools, by its row's ``extra_info``."""
        return Own(own_copy(kwargs_of(extra_info)))  # the samples of a group have one row

    async def answer(self, call: ToolCall, own: Own) -> Answer:
        """Returns what the model is told. Whatever goes wrong in the call is told it too.

        Args:
            call: what the model asks for.
            own: what the conversation has of the tools.
        """
        if call.error is not None:
            return Answer(f"error: {call.error}", failed=True)
        tool = self._box.tools.get(call.name)
        if tool is None:
            names = ", ".join(self._box.tools)
            return Answer(f"error: there is no tool '{call.name}'; there is {names}", failed=True)
        try:
            arguments = tool.arguments(call.arguments)
        except ValueError as error:
            return Answer(f"error: {error}", failed=True)
        try:
            said = await own.call(tool, arguments, self.run)
        except TimedOut as error:
            return Answer(f"error: {call.name}: {error}", failed=True)
        except _Failed as failed:
            return Answer(f"error: {failed}", failed=True)
        try:
            return Answer(_text(said))
        except BaseException as error:  # what it returned may be of any kind
            if is_ours(error):
                raise
            return Answer(f"error: {call.name} returned what cannot be read: {_Failed(error)}", failed=True)

    async def run(self, function: Any, keywords: Mapping[str, Any]) -> Any:
        """Calls user code.

        Raises:
            TimedOut: it took too long.
            _Failed: it raised.
        """
        ended: asyncio.Future[Call] = self._loop.create_future()

        def done(call: Call) -> None:
            if not ended.done():
                ended.set_result(call)

        call = self._calls.start(function, keywords, on_done=done, on_freed=_nothing, timeout_s=self._box.timeout)
        try:
            await ended
        except asyncio.CancelledError:
            call.cancel()
            raise
        if call.error is None:
            return call.result
        if isinstance(call.error, TimedOut):
            raise call.error
        raise _Failed(call.error)

    async def close(self) -> None:
        """Cancels what runs; a thread is left to end by itself."""
        await self._calls.close()

    def _stray(self, count: int) -> None:
        logger.warning(f"{count} tool calls go on though they were given up; nothing can stop them.")

    def _bug(self, error: Exception) -> None:
        logger.opt(exception=error).error("A tool's end could not be told.")


class Own:
    """What one conversation has of the tools: its ``tools_kwargs``, and its instances of those that are classes."""

    def __init__(self, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        self._kwargs = kwargs
        self._made: dict[str, asyncio.Future[Any]] = {}

    async def call(self, tool: Tool, arguments: Mapping[str, Any], run: Any) -> Any:
        """Calls a tool by ``run(function, keywords)``."""
        # A format may return one object for equal calls, and a function may change what it is given.
        own, arguments = own_copy(self._kwargs.get(tool.name, {})), own_copy(dict(arguments))
        if not tool.is_class:
            return await run(tool.target, {**arguments, **own})
        if tool.name not in self._made:
            # Two calls of one turn run side by side, and must find the same instance.
            self._made[tool.name] = asyncio.ensure_future(run(tool.target, own))
        try:
            instance = await asyncio.shield(self._made[tool.name])
        except Exception:
            self._made.pop(tool.name, None)  # the next call may fare better
            raise
        return await run(instance, arguments)

    async def close(self, run: Any) -> int:
        """Closes the instances; returns how many failed to."""
        failed = 0
        for made in self._made.values():
            if not made.done():
                made.cancel()
                continue
            if made.cancelled() or made.exception() is not None:
                continue
            close = getattr(made.result(), "close", None)
            if callable(close):
                try:
                    await run(close, {})
                except (TimedOut, _Failed) as error:
                    failed += 1
                    logger.warning(f"A tool's close failed: {error}")
        return failed


class _Failed(Exception):
    """A tool raised."""

    def __init__(self, error: BaseException) -> None:
        text = message_of(error)
        super().__init__(f"{type(error).__name__}{': ' + text if text else ''}")


def kwargs_of(extra_info: Any) -> dict[str, dict[str, Any]]:
    """Returns a sample's ``tools_kwargs``: for each tool's name its keywords.

    Parquet gives every row the keys of all rows: what is None there was not given.

    Raises:
        DataError: it is something else.
    """
    found = (extra_info or {}).get("tools_kwargs") or {}
    if not isinstance(found, Mapping):
        raise DataError(f"extra_info: tools_kwargs is a {type(found).__name__}; give {{tool's name: {{...}}}}.")
    kwargs: dict[str, dict[str, Any]] = {}
    for name, given in found.items():
        if given is None:
            continue
        if not isinstance(given, Mapping):
            raise DataError(
                f"extra_info: tools_kwargs of '{name}' is a {type(given).__name__}; give {{keyword: value}}."
            )
        kwargs[name] = {key: value for key, value in given.items() if value is not None}
    return kwargs


def _text(result: Any) -> str:
    """Returns what the model reads of what a tool returned: a text as it is, all else as JSON."""
    if isinstance(result, str):
        return result
    return "" if result is None else json.dumps(result, ensure_ascii=False, default=str)


def _nothing(_call: Call) -> None: ...
