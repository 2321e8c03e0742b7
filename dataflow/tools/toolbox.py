"""Toolbox: the tools of a run, and how its model calls them and reads their answers; loaded in each process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from loguru import logger

from dataflow.batch import Batch
from dataflow.cluster.frozen import FrozenExit, frozen_exit
from dataflow.data.tokenize import DESCRIBED, load_chat_tokenizer, prompt_ids
from dataflow.errors import DataError, ModelError, nearest
from dataflow.models.chat import without
from dataflow.tools.calls import LONGEST, ToolCaller, tools_kwargs
from dataflow.tools.formats import Format, Framing, ToolCall
from dataflow.tools.readers import AUTO, Answers, Reader, TextReader, find_format, find_reader
from dataflow.tools.registry import READY, Tool, choose_tools, marked_tools
from dataflow.usercode.load import load_file

# Texts that no template changes, so that they can be found in its output.
_TEXT, _ANSWER = "dataflow-said", "dataflow-answer"
FROZEN_S = 60.0
"""Least default of ``tools.frozen_after``: an engine in the same process may keep Python's lock for some seconds."""


@dataclass(frozen=True)
class Toolbox:
    """The tools of a run. Only these settings are pickled; the engine's process loads the tools itself.

    Attributes:
        model: directory of the tokenizer, whose chat template frames the answers.
        path: file with the user's tools.
        names: of the tools to offer; all marked ones of the file if empty.
        timeout: seconds that a call may take; None for no limit.
        format: how the model writes its calls.
        frozen_after: seconds that a call may keep anything else from running in a service's process; after that the
            process is ended. None for ``timeout``, but at least :data:`FROZEN_S`; 0 for no limit.
        options: of the chat template, such as ``{"enable_thinking": False}``.
        longest: characters of an answer.
        side: of a longer answer that is cut: left, middle or right.
    """

    model: str | None = None
    path: str | None = None
    names: tuple[str, ...] = ()
    timeout: float | None = 10.0
    format: str = AUTO
    frozen_after: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    longest: int = LONGEST
    side: str = "middle"

    def __getstate__(self) -> dict[str, Any]:
        # Loaded modules are left out, as another process cannot import the user's module by name. The path is
        # absolute, as that process may have another working directory.
        path = str(Path(self.path).expanduser().absolute()) if self.path else None
        return {**{name: getattr(self, name) for name in self.__dataclass_fields__}, "path": path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def check(self) -> Toolbox:
        """Loads the tools and the format, so that errors show before the run starts; returns itself.

        Raises:
            ConfigError: as of :func:`load_tools` and :func:`find_format`.
        """
        _ = self.tools, self.how
        return self

    @cached_property
    def tools(self) -> dict[str, Tool]:
        return choose_tools(self._module, self.names, self._where)

    @cached_property
    def how(self) -> Format | str:
        """The user's format, or the name of another."""
        return find_format(self.format, self._module, f"tools.format={self.format}")

    @cached_property
    def reader(self) -> Reader:
        return find_reader(self.how, self.tokenizer, self.schemas, self.options)

    @property
    def guessed(self) -> bool:
        """Whether the chat template describes the tools, but nothing shows how the model writes its calls."""
        return isinstance(self.reader, TextReader) and self.reader.guessed and self._shown

    @cached_property
    def _module(self) -> ModuleType | None:
        return load_file(self.path, self._where) if self.path else None

    @property
    def _where(self) -> str:
        return f"tools.path={self.path}" if self.path else "tools.names"

    @cached_property
    def schemas(self) -> list[dict[str, Any]]:
        """JSON schemas that describe the tools to the model."""
        return [tool.schema for tool in self.tools.values()]

    @cached_property
    def tokenizer(self) -> Any:
        if self.model is None:
            raise ModelError("the tools have no tokenizer; set model.path.")
        return load_chat_tokenizer(self.model, self.options)

    def described(self, prompts: Batch, longest: int | None = None) -> Batch:
        """Returns the prompts with descriptions of the tools, if the chat template supports them.

        Args:
            prompts: columns ``prompt_ids`` and ``raw_prompt``.
            longest: largest number of tokens of such a prompt.

        Raises:
            DataError: a prompt becomes too long, or its ``tools_kwargs`` do not fit the tools.
        """
        extras = prompts["extra_info"] if "extra_info" in prompts else [None] * len(prompts)
        for group, extra in zip(prompts.ids, extras, strict=True):
            self._check_kwargs(tools_kwargs(extra), f"rollout: extra_info of group {group}")
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
        """Whether the chat template describes the tools."""
        chat = [{"role": "user", "content": _TEXT}]
        shown = prompt_ids(self.tokenizer, chat, self.schemas) != prompt_ids(self.tokenizer, chat)
        if not shown:
            logger.info("The chat template describes no tools: the model learns of them only from its prompts.")
        return shown

    def _check_kwargs(self, given: Mapping[str, Mapping[str, Any]], where: str) -> None:
        for name in given:
            if name not in self._known:
                raise DataError(
                    f"{where}: tools_kwargs names '{name}', which is not a tool{nearest(name, self._known)}."
                )
        for name, tool in self.tools.items():
            tool.check_own(given.get(name, {}), where)

    @cached_property
    def _known(self) -> dict[str, Any]:
        """All tools by name, those included that this run leaves out."""
        return {**READY, **marked_tools(self._module, self._where), **self.tools}

    def read(self, before: Sequence[int], turn: Sequence[int], called: bool = True) -> tuple[str, list[ToolCall]]:
        """Returns the text of a turn of the model without special tokens, and its calls.

        Args:
            before: the tokens that it was sampled after.
            turn: its tokens.
            called: whether to look for calls.
        """
        text = str(self.tokenizer.decode(list(turn), skip_special_tokens=True))
        return text, self.reader.calls(before, turn) if called else []

    def framed(self, before: Sequence[int], turn: Sequence[int], answers: Sequence[tuple[ToolCall, str]]) -> list[int]:
        """Returns the tokens between a turn and the model's next one: the tools' answers in their frame.

        If the reader does not know the frame, it is what the chat template renders behind the text of an assistant's
        message when messages of role ``tool`` follow and the assistant is to speak. So the template must leave the
        assistant's text as it is and begin what follows with a special token: the answers are tokenised by themselves.

        Args:
            before: the tokens that the turn was sampled after.
            turn: the model's tokens; the frame begins with the token that ends a turn unless that one ended it.
            answers: each call with its answer, in order.

        Raises:
            ModelError: the template cannot frame answers.
        """
        answers = [(call, without(text, self._tags)) for call, text in answers]
        found = self.reader.framed(before, turn, answers)
        if found is not None:
            return found
        ids: list[int] = self.tokenizer.encode(self._behind(answers), add_special_tokens=False)
        return ids[1:] if turn and ids and ids[0] == turn[-1] else ids

    def _behind(self, answers: Answers) -> str:
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TEXT}]
        chat += [{"role": "tool", "name": call.name, "content": text} for call, text in answers]
        try:
            text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template may raise any exception
            raise ModelError(f"{self._whose} cannot frame a tool's answer: {error}.") from error
        _before, found, behind = text.partition(_TEXT)
        if not found:
            raise ModelError(f"{self._whose} does not show what the assistant said before a tool's answer.")
        return str(behind)

    @property
    def _whose(self) -> str:
        return f"model.path={self.model}: the chat template"

    @cached_property
    def _tags(self) -> list[str]:
        """Special tokens, and what else has a token of its own as a tag: a tool cannot end its own frame."""
        tokenizer = self.tokenizer
        added = [text for text in tokenizer.get_added_vocab() if text[:1] in "<[" and text[-1:] in ">]"]
        return list(dict.fromkeys([*tokenizer.all_special_tokens, *added]))

    @cached_property
    def _frames(self) -> None:
        """Checks, once, that a tool's answer can be rendered."""
        before = prompt_ids(self.tokenizer, [{"role": "user", "content": "?"}], self.schemas)
        turn, answers = self.tokenizer.encode(_TEXT, add_special_tokens=False), [(ToolCall("tool"), _ANSWER)]
        if self.reader.framed(before, turn, answers) is None and _ANSWER not in self._behind(answers):
            raise ModelError(f"{self._whose} leaves out messages of role 'tool'; give the model one that has them.")

    def check_model(self) -> Toolbox:
        """Checks that calls can be read and answers framed; returns itself.

        Raises:
            ModelError: the tokenizer does not fit the format, or the chat template cannot frame an answer, and the
                format does not do it either.
        """
        _ = self.reader
        if not isinstance(self.how, Framing):
            _ = self._frames
        return self

    def ready(self, prompts: Batch, longest: int | None = None) -> Batch:
        """Returns the prompts of :meth:`described` when all is loaded and checked."""
        return self.check_model().described(prompts, longest)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ToolCaller]:
        """Yields a caller of the tools; calls that still run at the end are cancelled."""
        caller = ToolCaller(self.tools, self.timeout, self._frozen_exit(), self.longest, self.side)
        try:
            yield caller
        finally:
            await caller.close()

    def _frozen_exit(self) -> FrozenExit | None:
        """Returns what ends the process of a frozen engine; None in the run's own process."""
        after_s = max(FROZEN_S, self.timeout or 0.0) if self.frozen_after is None else self.frozen_after
        fix = "call it in a process of its own, with a time-out (subprocess)"
        return frozen_exit(after_s, "a tool", "tools.frozen_after", fix)


def toolbox_of(config: Any) -> Toolbox:
    """Returns the tools that a run offers.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
    """
    offer = config.tools
    how = offer.timeout, offer.format, offer.frozen_after, config.data.apply_chat_template_kwargs
    cut = offer.max_tool_response_length, offer.tool_response_truncate_side
    return Toolbox(config.model.path, offer.path, tuple(offer.names), *how, *cut)
