"""Conversation: the input of a reward model, made of the prompt and the response of a sample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import ConfigError
from dataflow.files import decoded
from dataflow.models.chat import calls_of, text_of, without
from dataflow.models.directory import room_of
from dataflow.models.tokenizer import load_tokenizer
from dataflow.rewards.judge.rubric import question_of


def messages_of(solution: str, extra_info: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Returns the chat that is scored: the prompt's messages, then the response or the turns of the conversation."""
    facts = extra_info or {}
    prompt, turns = facts.get("raw_prompt"), facts.get("conversation")
    chat = [{"role": "user", "content": question_of(facts)}] if prompt is None else list(prompt)
    chat += [{"role": "assistant", "content": solution}] if turns is None else list(turns)
    return [_message(turn) for turn in chat]


def _message(turn: Mapping[str, Any]) -> dict[str, Any]:
    content, calls = turn.get("content"), calls_of(turn)
    text = "" if content is None else text_of(content)
    if not text.isascii():  # half a surrogate pair is no Unicode character, which neither tokenizers nor JSON can hold
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    named = {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key) is not None}
    return {"role": str(turn.get("role", "user")), "content": text, **named, **({"tool_calls": calls} if calls else {})}


class Renderer:
    """Turns chats into token ids, with the tokenizer and the chat template of the reward model.

    Special tokens that the tokenizer adds to a text are there once, whether or not the template writes them, too. Those
    that a message spells out are left out: a response could end its own turn with them, and write the next one. A
    longer input loses tokens at its left, after the special tokens at its begin.

    Args:
        path: of the model's directory.
        template: file of another chat template.
        limit: longest input in tokens; None for the model's positions.
        key: of the model's section, for messages.

    Raises:
        ConfigError: there is no tokenizer, no template, or no number of positions.
    """

    def __init__(self, path: str, template: str | None, limit: int | None, key: str) -> None:
        directory = Path(path).expanduser()
        self._tokenizer = load_tokenizer(str(directory), f"{key}.path")
        where = f"{key}.path={path}" if template is None else f"{key}.template={template}"
        self._template = None if template is None else read_template(template, where)
        if self._template is None and not getattr(self._tokenizer, "chat_template", None):
            raise ConfigError(
                f"{key}.path={path}: the tokenizer has no chat template; give {key}.template, a Jinja file."
            )
        positions = room_of(directory).positions
        if limit is None and positions is None:
            raise ConfigError(f"{key}.path={path}: config.json does not say how long an input may be; give "
                              f"{key}.max_model_len.")  # fmt: skip
        self.limit = min(number for number in (limit, positions) if number is not None)
        plain, special = self._encode("x", False), self._encode("x", True)
        begin = next((at for at in range(len(special)) if special[at : at + len(plain)] == plain), 0)
        self._begin, self._end = special[:begin], special[begin + len(plain) :]
        check_template(self._tokenizer, self._template, where)

    def __call__(self, chat: Sequence[Mapping[str, Any]]) -> tuple[list[int], int]:
        """Returns the token ids of a chat, and how many were cut off.

        Raises:
            ValueError: the template cannot be applied to the chat.
        """
        try:
            text = self._tokenizer.apply_chat_template(
                [self._rendered(turn) for turn in chat],
                tokenize=False,
                chat_template=self._template,
                add_generation_prompt=False,
            )
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template cannot be applied to the conversation: {why}") from error
        ids = self._encode(str(text), False)
        begin, end = self._begin, self._end
        if begin and ids[: len(begin)] != begin:
            ids = begin + ids
        if end and ids[-len(end) :] != end:
            ids = ids + end
        cut = max(0, len(ids) - self.limit)
        return (begin + ids[len(begin) + cut :] if cut else ids), cut

    def _rendered(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a message as templates expect it."""
        text, special = turn["content"], self._tokenizer.all_special_tokens
        if any(token in text for token in special):
            text = without(text, special)
        calls = {"tool_calls": list(map(_with_arguments, turn["tool_calls"]))} if "tool_calls" in turn else {}
        return {**turn, "content": text, **calls}

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a tool call whose arguments are a dict, as templates write them; in OpenAI's form they are JSON text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (ValueError, RecursionError):  # what a model wrote need not be JSON
        return dict(call)


def check_template(tokenizer: Any, template: str | None, where: str) -> None:
    """Raises a ConfigError if a chat template cannot be applied, or writes the same for two responses."""
    written = []
    for response in ("one", "two"):
        chat = [{"role": "user", "content": "x"}, {"role": "assistant", "content": response}]
        try:
            written.append(tokenizer.apply_chat_template(chat, tokenize=False, chat_template=template))
        except Exception as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ConfigError(
                f"{where}: the chat template cannot be applied to a question and its answer ({type(error).__name__}: "
                f"{reason}); correct it, or give another as template."
            ) from error
    if written[0] == written[1]:
        raise ConfigError(
            f"{where}: the chat template writes the same for two responses, so that all would have one score; let it "
            "write the content of all messages."
        )


def read_template(path: str, where: str) -> str:
    """Returns the text of a chat template's file, or raises a ConfigError that begins with ``where``."""
    try:
        return decoded(Path(path).expanduser().read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read ({error}); give a Jinja file.") from error
