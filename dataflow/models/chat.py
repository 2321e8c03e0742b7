"""The contents of chat messages: as text, what tools they call, and without special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def text_of(content: Any) -> str:
    """Returns the content of a chat message as text; for an image, the placeholder ``<image>``.

    >>> text_of([{"type": "image", "image": b"..."}, {"type": "text", "text": " Is it red?"}])
    '<image> Is it red?'
    """
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, Mapping) and "type" in part for part in content):
        return "".join(str(part.get("text", "")) if part["type"] == "text" else f"<{part['type']}>" for part in content)
    return json.dumps(content, ensure_ascii=False, default=str)


def calls_of(message: Mapping[str, Any]) -> list[Any]:
    """Returns the tool calls of a chat message in OpenAI's form, which may have no other content."""
    calls = message.get("tool_calls")
    return [] if calls is None else list(calls)


def without(text: str, tokens: Sequence[str]) -> str:
    """Returns a text without these tokens, including those that arise from removals, in linear time.

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
