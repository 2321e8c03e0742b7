"""Escapes within escapes in texts, such as JSON in JSON in a parameter of an address."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_LAYERS = 4
_ESCAPE = re.compile(
    r"\\u([0-9a-fA-F]{4})|(?:\\x|%)([0-9a-fA-F]{2})|&#[xX]([0-9a-fA-F]{1,4});|&#(\d{1,4});|&(quot|apos|amp|lt|gt);"
    r"|\\([\"'/\\nrt])"
)
_ESCAPED = {"quot": '"', "apos": "'", "amp": "&", "lt": "<", "gt": ">", "n": "\n", "r": "\r", "t": "\t"}


def layers(text: str) -> Iterator[tuple[str, Sequence[int]]]:
    """Yields a text as it is, and again for each layer of escapes that is decoded.

    Yields:
        The text, and the positions in the original of its characters and its end.
    """
    at: Sequence[int] = range(len(text) + 1)
    yield text, at
    for _layer in range(_LAYERS):
        if not _ESCAPE.search(text):
            return
        text, at = _decoded(text, at)
        yield text, at


def _character(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code or found[4]:
        return chr(int(code, 16) if code else int(found[4]))
    short = found[5] or found[6]
    return _ESCAPED.get(short, short)


def _decoded(text: str, at: Sequence[int]) -> tuple[str, Sequence[int]]:
    parts: list[str] = []
    places: list[int] = []
    done = 0
    for found in _ESCAPE.finditer(text):
        parts += [text[done : found.start()], _character(found)]
        places += [*at[done : found.start()], at[found.start()]]
        done = found.end()
    return "".join([*parts, text[done:]]), [*places, *at[done:]]
