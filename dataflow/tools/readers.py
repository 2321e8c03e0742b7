"""Readers: they find the calls in the tokens of a turn, and frame the answers. Most are those of a library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from loguru import logger

from dataflow.errors import ConfigError, ModelError, nearest
from dataflow.system.http import short
from dataflow.tools.formats import Format, Framing, Hermes, ToolCall
from dataflow.usercode.load import describe, pick

Answers: TypeAlias = Sequence[tuple[ToolCall, str]]
AUTO = "auto"
OWN: dict[str, type[Format]] = {"hermes": Hermes}
"""The formats that are read as text here."""
_MARKS = {
    "<function=": "qwen3.5",
    "<arg_key>": "glm",
    "<｜tool▁calls▁begin｜>": "deepseek-v3",
    "[TOOL_CALLS]": "mistral",
    "<|python_tag|>": "llama3_json",
    "<tool_call>": "qwen3",
}
"""Of templates that no renderer renders: what a template with this text has its calls read by (renderers, or vLLM)."""
_TRIES = 16
"""How often a turn with broken calls is parsed again."""


class Reader(Protocol):
    """Reads the turns of one model."""

    def calls(self, before: Sequence[int], turn: Sequence[int]) -> list[ToolCall]:
        """Returns the calls in a turn, in order.

        Args:
            before: the tokens that the turn was sampled after.
            turn: its tokens.
        """
        ...

    def framed(self, before: Sequence[int], turn: Sequence[int], answers: Answers) -> list[int] | None:
        """Returns the tokens between a turn and the model's next one; None leaves that to the chat template.

        Args:
            before: the tokens that the turn was sampled after.
            turn: its tokens.
            answers: each call with its answer.
        """
        ...


class TextReader:
    """Reads the text of a turn by a format, which may frame the answers, too.

    Attributes:
        guessed: whether nothing showed that this is how the model writes its calls.
    """

    def __init__(self, tokenizer: Any, how: Format, guessed: bool = False) -> None:
        self._tokenizer, self._format, self.guessed = tokenizer, how, guessed

    def calls(self, before: Sequence[int], turn: Sequence[int]) -> list[ToolCall]:
        """See :class:`Reader`."""
        return self._format.parse(self._tokenizer.decode(list(turn), skip_special_tokens=False))

    def framed(self, before: Sequence[int], turn: Sequence[int], answers: Answers) -> list[int] | None:
        """See :class:`Reader`."""
        if not isinstance(self._format, Framing):
            return None
        text = self._format.frame([text for _, text in answers])
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class VllmFormat:
    """One of ``vllm.tool_parsers``, which parse the text behind the thinking.

    Raises:
        Exception: the tokenizer lacks what the parser needs.
    """

    def __init__(self, tokenizer: Any, name: str, schemas: Sequence[Mapping[str, Any]]) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        request: Any = ChatCompletionRequest(messages=[], model="", tools=list(schemas))
        kind = ToolParserManager.get_tool_parser(name)
        self._request, self._eos = request, tokenizer.eos_token or ""
        self._build: Callable[[], Any] = lambda: kind(tokenizer, request.tools)
        marks = [mark for name, mark in vars(self._build()).items() if "start" in name or name.startswith("bot_")]
        self._marks = [mark for mark in marks if isinstance(mark, str) and mark]

    def parse(self, text: str) -> list[ToolCall]:
        """See :class:`~dataflow.tools.formats.Format`."""
        thought, _, said = text.removesuffix(self._eos).partition("</think>")
        # The prompt may begin the thinking; a "</think>" behind the start of a call is a part of it.
        if thought.lstrip().startswith("<think>") or ("</think>" in text and not self._marked(thought)):
            text = said
        else:
            text = text.removesuffix(self._eos)
        found = self._build().extract_tool_calls(text, self._request)  # a new one: they keep state
        if found.tools_called:
            return [ToolCall.of(each.function.name, each.function.arguments) for each in found.tool_calls]
        fault = "the tool call cannot be read; write it as the first message shows"
        return [ToolCall("", error=fault)] if self._marked(text) else []

    def _marked(self, text: str) -> bool:
        return any(mark in text for mark in self._marks)


class RendererReader:
    """Reads by a renderer of the library ``renderers``, which tells tags from text by their tokens.

    Args:
        tokenizer: of the model.
        renderer: of its family.
        schemas: JSON schemas of the tools.
    """

    def __init__(self, tokenizer: Any, renderer: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer, self._renderer, self._schemas = tokenizer, renderer, list(schemas)

    def calls(self, before: Sequence[int], turn: Sequence[int]) -> list[ToolCall]:
        """See :class:`Reader`.

        A tag that a model writes in an argument may be the token of the tag that ends a call. So where a call is
        broken, the turn is parsed again with that token as text.
        """
        prompt, ids = list(before), list(turn)
        try:
            found, tries, at = self._attempts(prompt, ids), _TRIES, 0
            while at < len(found):
                call, longer = found[at], ids
                while tries and not _whole(call) and call.token_span is not None:
                    tries -= 1
                    longer = self._longer(longer, call)
                    again = self._attempts(prompt, longer)
                    if at >= len(again):
                        break
                    call = again[at]
                    # Of XML, the end of the next call may close a tag that this one left open.
                    if _whole(call) and (len(again) >= len(found) or call.raw.lstrip().startswith("{")):
                        found, ids = again, longer
                at += 1
        except Exception as error:  # what a model may write has no limits, and a parser may raise anything
            return [ToolCall("", error=f"the tool call cannot be read ({type(error).__name__}: {error})")]
        return [_call(each) for each in found]

    def _attempts(self, prompt: list[int], ids: list[int]) -> list[Any]:
        return list(self._renderer.parse_response(ids, tools=self._schemas, prompt_ids=prompt).tool_calls)

    def _longer(self, ids: list[int], call: Any) -> list[int]:
        """Returns the tokens with the one that ends a call as text; with that token at the end if it is missing."""
        end = call.token_span[1]
        if call.status.value == "unclosed_block":
            return [*ids[:end], *self._tokenizer.encode("</tool_call>", add_special_tokens=False)]
        text = self._tokenizer.decode(ids[end - 1 : end], skip_special_tokens=False)
        plain = [
            token for part in (text[:1], text[1:]) for token in self._tokenizer.encode(part, add_special_tokens=False)
        ]
        return [*ids[: end - 1], *plain, *ids[end:]]

    def framed(self, before: Sequence[int], turn: Sequence[int], answers: Answers) -> list[int] | None:
        """See :class:`Reader`."""
        messages = [
            {"role": "tool", "name": call.name or "tool", "content": text, "tool_call_id": call.id or ""}
            for call, text in answers
        ]
        known = [*before, *turn]
        bridged = self._renderer.bridge_to_next_turn(list(before), list(turn), messages, tools=self._schemas)
        if bridged is None or list(bridged.token_ids[: len(known)]) != known:
            return None
        return list(bridged.token_ids[len(known) :])


def _whole(found: Any) -> bool:
    return _call(found).error is None


def _call(found: Any) -> ToolCall:
    """Returns a call that a renderer found, with an error unless it has all that was written in it."""
    call = ToolCall.of(found.name, found.arguments, found.id)
    raw, status = found.raw.strip(), found.status.value
    left_open = any(
        raw.rfind(f"<{tag}") > raw.rfind(f"</{tag}") and f"<{tag}" not in str(found.arguments)
        for tag in ("parameter", "arg_value")
    )
    if call.error is None and not left_open and status != "malformed_structure":
        return call
    if raw.startswith(("{", "[", '"')) or status == "invalid_json":
        try:
            json.loads(raw)
        except (ValueError, RecursionError) as error:
            return ToolCall(found.name or "", error=f"the tool call is not valid JSON ({error})")
        return call
    fault = "the tool call is not complete: it lacks its name, or a tag that ends a part"
    return ToolCall(found.name or "", error=fault)


def find_format(name: str, module: ModuleType | None = None, where: str = "tools.format") -> Format | str:
    """Returns a class of the user's file, built, or a name that :func:`find_reader` knows.

    Raises:
        ConfigError: there is none, or it cannot parse calls.
    """
    if name == AUTO or name in OWN:
        return name
    if module is None or not hasattr(module, name):
        if name in _families() or name in _vllm_parsers():
            return name
        known = [AUTO, *OWN, *_families(), *_vllm_parsers()]
        if module is None:
            hint = nearest(name, known) or f"; give one of {', '.join(known)}, or tools.path too."
            raise ConfigError(f"{where}: there is no format '{name}'{hint}")
    kind: Any = pick(module, name, where)
    if not callable(getattr(kind, "parse", None)):
        raise ConfigError(f"{where}: '{name}' has no method parse(text) that returns a list of ToolCall.")
    try:
        built: Format = kind() if isinstance(kind, type) else kind
        return built
    except Exception as error:
        raise ConfigError(f"{where}: '{name}' cannot be built: {describe(error)}.") from error


def find_reader(
    how: Format | str, tokenizer: Any, schemas: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Reader:
    """Returns the reader of a model's turns.

    Args:
        how: of :func:`find_format`. ``auto`` is the family whose renderer renders a chat with these tools as the
            model's template does, or else what the template's text shows.
        tokenizer: of the model.
        schemas: JSON schemas of the tools.
        options: of the chat template, which the tokenizer applies by itself.

    Raises:
        ModelError: the tokenizer is not one of the family that is named.
    """
    if not isinstance(how, str):
        return TextReader(tokenizer, how)
    if how == AUTO:
        return _recognised(tokenizer, schemas, options)
    if how in OWN:
        return TextReader(tokenizer, OWN[how]())
    try:
        if how not in _families():
            return TextReader(tokenizer, VllmFormat(tokenizer, how, schemas))
        renderer = _rendering([how], tokenizer, schemas, options) or _renderer(how, tokenizer, options)
    except Exception as error:  # of a library, from a tokenizer that it was not made for
        raise ModelError(f"tools.format={how}: the model's tokenizer does not fit ({error}).") from error
    return RendererReader(tokenizer, renderer, schemas)


def _recognised(tokenizer: Any, schemas: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> Reader:
    from renderers import DefaultRendererConfig, create_renderer

    renderer = _rendering(_families(), tokenizer, schemas, options)
    if renderer is not None:
        logger.info(f"tools.format=auto: the chat template is that of {renderer.config.name}.")
        return RendererReader(tokenizer, renderer, schemas)
    template, vocabulary = str(tokenizer.chat_template), tokenizer.get_vocab()
    name = next((name for mark, name in _MARKS.items() if mark in template), None)
    if name in ("mistral", "llama3_json"):
        reader: Reader = TextReader(tokenizer, VllmFormat(tokenizer, name, schemas))
    elif name is not None and ("<｜tool▁calls▁begin｜>" if name == "deepseek-v3" else "<tool_call>") in vocabulary:
        default = create_renderer(tokenizer, DefaultRendererConfig(tool_parser=name))
        reader = RendererReader(tokenizer, default, schemas)
    else:
        reader = TextReader(tokenizer, Hermes(), guessed=name != _MARKS["<tool_call>"])
        name = "hermes"
    logger.info(f"tools.format=auto: the chat template is of no known family; calls are read as those of {name}.")
    return reader


def _rendering(
    names: Sequence[str], tokenizer: Any, schemas: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Any:
    """Returns the first renderer that renders a chat as the model's template does; None if none does."""
    chat = [{"role": "system", "content": "!"}, {"role": "user", "content": "?"}]
    how = {"tools": list(schemas), "add_generation_prompt": True}
    try:
        # Llama's template has the day's date, unless it is given; the renderer has this one.
        date = {"date_string": "26 Jul 2024", **options}
        wanted = list(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False, **how, **date))
    except Exception as error:  # a template may raise anything; one that refuses this chat is of no family
        _warn("the chat template does not render a chat with a system message and tools", error)
        return None
    for name in names:
        for more in ({}, {"enable_thinking": False}):
            try:
                found = _renderer(name, tokenizer, {**more, **options})
                if list(found.render_ids(chat, **how)) == wanted:
                    return found
            except (AssertionError, ValueError, ModelError):  # the tokenizer lacks the family's tokens
                break
            except Exception as error:
                _warn(f"it cannot be told whether the chat template is that of {name}", error)
                break
    return None


def _warn(what: str, error: Exception) -> None:
    logger.warning(f"tools.format: {what} ({short(f'{type(error).__name__}: {error}')}).")


def _renderer(name: str, tokenizer: Any, options: Mapping[str, Any]) -> Any:
    from renderers import config_from_name, create_renderer

    if name == "gpt-oss" and "<|channel|>" not in tokenizer.get_vocab():
        raise ModelError("it has no token <|channel|>")  # the renderer would load its own vocabulary, by the network
    return create_renderer(tokenizer, config_from_name(name), chat_template_kwargs=dict(options) or None)


def _families() -> list[str]:
    from renderers.base import MODEL_RENDERER_MAP

    return list(dict.fromkeys(MODEL_RENDERER_MAP.values()))


def _vllm_parsers() -> list[str]:
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError:
        return []
    return list(ToolParserManager.list_registered())
