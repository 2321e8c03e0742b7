"""Readers: they find the calls in a turn of the model, and frame the tools' answers for it.

The library ``renderers`` does both, by the tokens, for the families of models that it knows. For other chat templates
the calls are read as text, by Hermes' format or one of the user's, and the answers are framed by the template.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from loguru import logger

from dataflow.errors import ConfigError, ModelError, nearest
from dataflow.usercode.load import describe, pick

AUTO, HERMES = "auto", "hermes"
_SAID = "dataflow-said"  # a text that no template changes


@dataclass(frozen=True)
class ToolCall:
    """One call that a model asks for; ``error`` is the answer to the model if it cannot be made."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    id: str | None = field(default=None, repr=False, compare=False)  # that the model gave it, as Kimi does

    @staticmethod
    def of(name: Any, arguments: Any, given_id: str | None = None) -> ToolCall:
        """Returns a call as a model wrote it: its arguments are an object, or the JSON text of one.

        >>> ToolCall.of("add", '{"a": 1}')
        ToolCall(name='add', arguments={'a': 1}, error=None)
        """
        if not isinstance(name, str) or not name:
            return ToolCall("", error='a tool call is an object with "name" and "arguments"')
        if isinstance(arguments, str) and arguments:
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                return ToolCall(name, error=f'"arguments" of the tool call is not valid JSON ({error})')
        if not isinstance(arguments or {}, dict):
            return ToolCall(name, error='"arguments" of a tool call is an object')
        return ToolCall(name, arguments or {}, id=given_id)


Answers: TypeAlias = Sequence[tuple[ToolCall, str]]


class Format(Protocol):
    """Parses a model's calls. A user's format is a class in the file ``tools.path``, built without arguments.

    It may also have ``frame(answers: Sequence[str]) -> str``, which returns the text between a turn with calls and the
    model's next turn, in place of what the chat template makes of the answers.
    """

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls in the text of one whole turn, including special tokens; [] if there is none."""
        ...


class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number per turn.

    Thinking is skipped: text in ``<think>``, and all before a ``</think>`` whose start is in the prompt.

    >>> Hermes().parse('So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, error=None)]
    """

    _PART = re.compile(r"<think>.*?(?:</think>|\Z)|</think>|<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)

    def parse(self, text: str) -> list[ToolCall]:
        """See :class:`Format`."""
        calls: list[ToolCall] = []
        for part in self._PART.finditer(text):
            if part[0] == "</think>":
                calls.clear()
            elif part[1] is not None:
                calls.append(self._call(part[1]))
        return calls

    def _call(self, text: str) -> ToolCall:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            return ToolCall("", error=f"the tool call is not valid JSON ({error})")
        found = found if isinstance(found, dict) else {}
        return ToolCall.of(found.get("name"), found.get("arguments"))


class Reader:
    """Reads the calls in the turns of one model by a format, and frames the answers by the chat template."""

    def __init__(self, tokenizer: Any, how: Format) -> None:
        self._tokenizer, self._format = tokenizer, how

    def calls(self, before: Sequence[int], turn: Sequence[int]) -> list[ToolCall]:
        """Returns the calls in a turn, which was sampled after the tokens ``before``, in order."""
        return self._format.parse(self._tokenizer.decode(list(turn), skip_special_tokens=False))

    def framed(self, before: Sequence[int], turn: Sequence[int], answers: Answers) -> list[int]:
        """Returns the tokens between a turn and the model's next one.

        They are what the chat template renders behind the text of an assistant's message when messages of role ``tool``
        follow and the assistant is to speak. So the template must leave the assistant's text as it is and begin what
        follows with a special token: the answers are tokenised by themselves. The token that ends a turn is left out if
        the turn has it.
        """
        if (frame := getattr(self._format, "frame", None)) is not None:
            return list(self._tokenizer.encode(frame([text for _, text in answers]), add_special_tokens=False))
        chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _SAID}]
        chat += [{"role": "tool", "name": call.name, "content": text} for call, text in answers]
        try:
            text = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            _before, behind = text.split(_SAID)
        except Exception as error:  # a template may raise any exception
            raise ModelError(f"model.path: the chat template cannot frame a tool's answer: {error}.") from error
        ids = list(self._tokenizer.encode(behind, add_special_tokens=False))
        return ids[1:] if turn and ids and ids[0] == turn[-1] else ids


class FamilyReader(Reader):
    """Reads by the renderer of the model's family, of the library ``renderers``."""

    def __init__(self, tokenizer: Any, renderer: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(tokenizer, Hermes())
        self.renderer, self._schemas = renderer, list(schemas)

    def calls(self, before: Sequence[int], turn: Sequence[int]) -> list[ToolCall]:
        """See :class:`Reader`."""
        try:
            read = self.renderer.parse_response(list(turn), tools=self._schemas, prompt_ids=list(before))
        except Exception as error:  # what a model may write has no limits, and a parser may raise anything
            return [ToolCall("", error=f"the tool call cannot be read ({type(error).__name__}: {error})")]
        calls = []
        for found in read.tool_calls:
            status = found.status.value
            if status in ("ok", "unknown_tool"):
                calls.append(ToolCall.of(found.name, found.arguments, found.id))
                continue
            fault = "valid JSON" if status == "invalid_json" else "complete: it lacks its name, or a tag"
            calls.append(ToolCall(found.name or "", error=f"the tool call is not {fault}"))
        return calls

    def framed(self, before: Sequence[int], turn: Sequence[int], answers: Answers) -> list[int]:
        """See :class:`Reader`."""
        messages = [
            {"role": "tool", "name": call.name or "tool", "content": text, "tool_call_id": call.id or ""}
            for call, text in answers
        ]
        known = [*before, *turn]
        bridged = self.renderer.bridge_to_next_turn(list(before), list(turn), messages, tools=self._schemas)
        if bridged is None or list(bridged.token_ids[: len(known)]) != known:
            return super().framed(before, turn, answers)
        return list(bridged.token_ids[len(known) :])


def find_format(name: str, module: ModuleType | None = None, where: str = "tools.format") -> Format | str:
    """Returns a class of the user's file, built, or a name that :func:`find_reader` knows; else a ConfigError."""
    known = [AUTO, HERMES, *_families()]
    if name in known and not hasattr(module, name):
        return name
    if module is None:
        hint = nearest(name, known) or f"; give one of {', '.join(known)}, or tools.path too."
        raise ConfigError(f"{where}: there is no format '{name}'{hint}")
    kind: Any = pick(module, name, where)
    try:
        built: Format = kind()
    except Exception as error:
        raise ConfigError(f"{where}: '{name}' cannot be built: {describe(error)}.") from error
    if not callable(getattr(built, "parse", None)):
        raise ConfigError(f"{where}: '{name}' has no method parse(text) that returns a list of ToolCall.")
    return built


def find_reader(
    how: Format | str, tokenizer: Any, schemas: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Reader:
    """Returns the reader of a model's turns.

    ``how`` is that of :func:`find_format`. ``auto`` is the family whose renderer renders a chat with these tools as the
    model's template does, or else Hermes' format. ``options`` are the chat template's, which the tokenizer applies by
    itself.
    """
    if not isinstance(how, str):
        return Reader(tokenizer, how)
    try:
        renderer = None
        if how != HERMES:
            renderer = _alike(_families() if how == AUTO else [how], tokenizer, schemas, options)
        if renderer is None and how not in (AUTO, HERMES):
            renderer = _renderer(how, tokenizer, options)
    except Exception as error:  # of the library, from a tokenizer that it was not made for
        raise ModelError(f"tools.format={how}: the model's tokenizer does not fit ({error}).") from error
    logger.info(f"tools.format={how}: calls are read as those of {renderer.config.name if renderer else HERMES}.")
    return Reader(tokenizer, Hermes()) if renderer is None else FamilyReader(tokenizer, renderer, schemas)


def _alike(
    names: Sequence[str], tokenizer: Any, schemas: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Any:
    """Returns the first renderer that renders a chat as the model's template does; None if none does."""
    chat = [{"role": "system", "content": "!"}, {"role": "user", "content": "?"}]
    how = {"tools": list(schemas), "add_generation_prompt": True}
    # Llama's template has the day's date, unless it is given; the renderer has this one.
    date = {"date_string": "26 Jul 2024", **options}
    try:
        wanted = list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **how, **date))
    except Exception as error:  # a template may raise anything; one that refuses this chat is of no family
        logger.warning(f"tools.format: the chat template does not render a chat with a system message ({error}).")
        return None
    for name in names:
        for more in ({}, {"enable_thinking": False}):
            try:
                found = _renderer(name, tokenizer, {**more, **options})
                if list(found.render_ids(chat, **how)) == wanted:
                    return found
            except Exception as error:  # the tokenizer lacks the family's tokens, or the family these options
                logger.debug(f"tools.format: the chat template is not that of {name} ({error})")
                break
    return None


def _renderer(name: str, tokenizer: Any, options: Mapping[str, Any]) -> Any:
    from renderers import config_from_name, create_renderer

    if name == "gpt-oss" and "<|channel|>" not in tokenizer.get_vocab():
        raise ModelError("it has no token <|channel|>")  # the renderer would load its own vocabulary, by the network
    return create_renderer(tokenizer, config_from_name(name), chat_template_kwargs=dict(options) or None)


def _families() -> list[str]:
    from renderers.base import MODEL_RENDERER_MAP

    return list(dict.fromkeys(MODEL_RENDERER_MAP.values()))
