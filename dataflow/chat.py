"""The contents of chat messages as text."""

from __future__ import annotations

import json
from collections.abc import Mapping
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
