"""Formats of a model's calls: a format parses the calls in the text of a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from dataflow.errors import ConfigError
from dataflow.usercode.load import describe, pick


@dataclass(frozen=True)
class ToolCall:
    """One call that a model asks for.

    Attributes:
        name: of the tool; empty if it cannot be read.
        arguments: by name.
        error: the error message for the model; None if the call is valid.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


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
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number per turn: Qwen2.5, Qwen3, Hermes.

    Text in ``<think>`` is ignored. The last call may lack its end tag, as the end of the turn ends it too.

    >>> Hermes().parse('So <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    [ToolCall(name='add', arguments={'a': 1}, error=None)]
    """

    _CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
    _DECODER = json.JSONDecoder()

    def parse(self, text: str) -> list[ToolCall]:
        """See :class:`Format`."""
        reply = text.rpartition("</think>")[2]
        if "<think>" in reply:  # its end tag is missing
            reply = reply.partition("<think>")[0]
        return [self._call(match[1]) for match in self._CALL.finditer(reply)]

    def _call(self, body: str) -> ToolCall:
        try:
            # The end-of-turn token may follow the last call: the text after the object is not decoded.
            found, end = self._DECODER.raw_decode(body.lstrip())
        except (ValueError, RecursionError) as error:
            return ToolCall("", error=f"the tool call is not valid JSON ({error})")
        rest = body.lstrip()[end:].strip()
        if rest and not rest.startswith("<"):
            return ToolCall("", error="the tool call is not valid JSON (text follows the object)")
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return ToolCall("", error='a tool call is an object with "name" and "arguments"')
        arguments = found.get("arguments", {})
        if not isinstance(arguments, dict):
            return ToolCall(found["name"], error='"arguments" of a tool call is an object')
        return ToolCall(found["name"], arguments)


FORMATS: dict[str, type[Format]] = {"hermes": Hermes}


def find_format(name: str, module: ModuleType | None = None, where: str = "tools.format") -> Format:
    """Returns the format of a name: one of :data:`FORMATS`, or a class in the user's file.

    Raises:
        ConfigError: there is none, or it cannot parse calls.
    """
    kind = FORMATS.get(name)
    if kind is None and module is None:
        raise ConfigError(f"{where}: there is no format '{name}'; give one of {', '.join(FORMATS)}, or tools.path too.")
    if kind is None:
        kind = pick(module, name, where)  # type: ignore[arg-type]
    if not callable(getattr(kind, "parse", None)):
        raise ConfigError(f"{where}: '{name}' has no method parse(text) that returns a list of ToolCall.")
    try:
        return kind() if isinstance(kind, type) else kind
    except Exception as error:
        raise ConfigError(f"{where}: '{name}' cannot be built: {describe(error)}.") from error
