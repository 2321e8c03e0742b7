"""How a model writes its calls: what a format is, and one for templates that no library knows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class ToolCall:
    """One call that a model asks for.

    Attributes:
        name: of the tool; empty if it cannot be read.
        arguments: by name.
        error: the error message for the model; None if the call is valid.
        id: that the model gave the call, as Kimi does.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    id: str | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def of(name: Any, arguments: Any, given_id: str | None = None) -> ToolCall:
        """Returns a call as a model wrote it: its arguments are an object, or the JSON text of one.

        >>> ToolCall.of("add", '{"a": 1}')
        ToolCall(name='add', arguments={'a': 1}, error=None)
        """
        if not isinstance(name, str) or not name:
            return ToolCall("", error='a tool call is an object with "name" and "arguments"')
        if arguments in (None, ""):  # of a tool without any
            arguments = {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError) as error:
                return ToolCall(name, error=f'"arguments" of the tool call is not valid JSON ({error})')
        if not isinstance(arguments, dict):
            return ToolCall(name, error='"arguments" of a tool call is an object')
        return ToolCall(name, arguments, id=given_id)


class Format(Protocol):
    """Parses a model's calls. A user's format is a class in the file ``tools.path``, built without arguments."""

    def parse(self, text: str) -> list[ToolCall]:
        """Returns the calls in a turn, in order; [] if there is none.

        Args:
            text: of one whole turn, including special tokens.
        """
        ...


@runtime_checkable
class Framing(Protocol):
    """A format that also frames the answers for the model, in place of the chat template."""

    def frame(self, answers: Sequence[str]) -> str:
        """Returns the text between a turn with calls and the model's next turn.

        Args:
            answers: one for each call of the turn.
        """
        ...


class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number per turn, as text.

    The object is parsed before anything looks for its end, so its texts may contain any tag; the last end tag may be
    missing. Thinking is skipped: text in ``<think>``, and all before a ``</think>`` whose start is in the prompt.

    >>> Hermes().parse('So <tool_call>{"name": "add", "arguments": {"a": "</tool_call>"}}</tool_call>')
    [ToolCall(name='add', arguments={'a': '</tool_call>'}, error=None)]
    """

    _NEXT = re.compile(r"<think>.*?(?:</think>|\Z)|</think>|<tool_call>\s*", re.DOTALL)
    _TAG = re.compile(r"<(/?)tool_call>")
    _DECODER = json.JSONDecoder()

    def parse(self, text: str) -> list[ToolCall]:
        """See :class:`Format`."""
        calls: list[ToolCall] = []
        at = 0
        while (match := self._NEXT.search(text, at)) is not None:
            at = match.end()
            if match[0] == "</think>":
                calls.clear()
            elif match[0].startswith("<tool_call>"):
                call, at = self._call(text, at)
                calls.append(call)
        return calls

    def _call(self, text: str, start: int) -> tuple[ToolCall, int]:
        """Returns the call that starts here, and where to go on."""
        try:
            found, end = self._DECODER.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            tag = self._TAG.search(text, start)
            behind = start if tag is None else tag.end() if tag[1] else tag.start()
            return ToolCall("", error=f"the tool call is not valid JSON ({error})"), behind
        # The end-of-turn token may follow the last call.
        if (rest := text[end:].lstrip()) and not rest.startswith("<"):
            return ToolCall("", error="the tool call is not valid JSON (text follows the object)"), end
        if not isinstance(found, dict):
            return ToolCall.of(None, None), end
        return ToolCall.of(found.get("name"), found.get("arguments", {})), end
