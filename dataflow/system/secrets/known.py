"""The secrets that a process knows, found in texts: spaced, in parts, and in the encodings that servers echo."""

from __future__ import annotations

import base64
import html
import json
import os
import re
from collections.abc import Iterator
from typing import AnyStr
from urllib.parse import quote, quote_plus

from dataflow.system.secrets.escapes import layers

_SHORTEST = 4  # a shorter value would mask ordinary text
_WORD = 8  # a shorter value is masked only as a separate word
_PIECE, _STRIDE = 8, 4  # of a known value: any part of 11 characters contains such a piece
_VARIABLES = ("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD")

# A text is also searched with nothing left but its letters, in lower case, and its digits.
_SQUEEZED = 11  # a shorter one of letters alone or digits alone would mask ordinary text
_LOWER = bytes(range(256)).lower()
_REST = bytes(code for code in range(256) if not chr(code).isascii() or not chr(code).isalnum())


class Secrets:
    """The known secrets; finds them in texts."""

    def __init__(self) -> None:
        self._values: set[str] = set()
        self._pieces: tuple[tuple[str, int, str], ...] = ()
        """A piece, its position in an encoding of a value, and that encoding."""
        self._squeezed: tuple[tuple[bytes, int, bytes], ...] = ()
        """The same of squeezed encodings."""
        self._environment: dict[str, str] = {}

    def add(self, value: str | None) -> None:
        """Registers a secret; a value of less than 4 characters is ignored."""
        if value and len(value) >= _SHORTEST and value not in self._values:
            self._values.add(value)
            self._pieces = (*self._pieces, *_pieces_of(value))
            self._squeezed = (*self._squeezed, *_squeezed_of(value))

    def look(self) -> None:
        """Registers the secrets in the current environment."""
        for name in os.environ:
            if name.upper().endswith(_VARIABLES) and self._environment.get(name) != (value := os.environ.get(name, "")):
                self._environment[name] = value
                if len(value) >= _WORD and not value.isdigit() and not re.search(r"\s|^[/~.]", value):
                    self.add(value)

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the spans of every known secret and every part of one; they may overlap."""
        if not self._values:
            return
        for inner, at in layers(text):
            for piece in self._pieces:
                if piece[0] in inner:
                    for begin, end in _found(inner, *piece):
                        yield at[begin], at[end]
            squeezed = _squeeze(inner)
            places: list[int] = []
            for short, place, form in self._squeezed:
                if short in squeezed:
                    places = places or [i for i, c in enumerate(inner) if c.isascii() and c.isalnum()]
                    for first, last in _found(squeezed, short, place, form):
                        yield at[places[first]], at[places[last - 1] + 1]


def _squeeze(text: str) -> bytes:
    return text.encode("ascii", "replace").translate(_LOWER, _REST)


def _forms(value: str) -> set[str]:
    """Returns the encodings of a value that a server may echo."""
    raw = value.encode("utf-8", "surrogatepass")
    forms = {value, quote(raw), quote(raw, safe=""), quote_plus(raw), html.escape(value), repr(value)[1:-1]}
    forms |= {
        re.sub("%[0-9A-F]{2}", lambda found: found[0].lower(), form) for form in (quote(raw), quote(raw, safe=""))
    }
    forms |= {json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
    forms |= {form.replace("/", "\\/") for form in list(forms)}
    forms |= _codes(raw) if len(raw) >= _WORD else set()
    return {form for form in forms if form}


def _codes(raw: bytes) -> set[str]:
    """Returns bytes in base 16 and 64."""
    codes = {raw.hex(), raw.hex().upper()}
    for shift in range(3):  # its base64 depends on the length of the text before it
        text = base64.b64encode(b"\0" * shift + raw).decode()
        text = text[(0, 2, 3)[shift] : len(text) - (0, 3, 2)[(shift + len(raw)) % 3]]
        codes |= {text, text.replace("+", "-").replace("/", "_")}
    return codes


def _pieces_of(value: str) -> Iterator[tuple[str, int, str]]:
    """Yields the pieces to search for: whole short encodings, and pieces of long ones."""
    for form in sorted(_forms(value)):
        yield form, 0, form
        size, stride = (_PIECE, _STRIDE) if form == value else (2 * _PIECE, 2 * _PIECE)
        if len(form) >= 2 * _PIECE:
            for at in range(0, len(form) - size + 1, stride):
                piece = form[at : at + size]
                # Plain words in a value also occur in other texts.
                if any(c.isdigit() for c in piece) or not (piece.islower() or piece.isupper()):
                    yield piece, at, form


def _squeezed_of(value: str) -> Iterator[tuple[bytes, int, bytes]]:
    """Yields the squeezed encodings of a value, and pieces of it."""
    whole, raw = _squeeze(value), value.encode("utf-8", "surrogatepass")
    numbers = "".join(map(str, raw)).encode()
    for form in sorted({whole, numbers, *map(_squeeze, _codes(raw))}):
        if len(form) >= _SQUEEZED or (len(form) >= _WORD and _is_mixed(form)):
            yield form, 0, form
    for at in range(0, len(whole) - _PIECE + 1, _STRIDE):
        if _is_mixed(piece := whole[at : at + _PIECE]):
            yield piece, at, whole


def _is_mixed(squeezed: bytes) -> bool:
    """Returns whether there are letters and digits, as in no word."""
    return not squeezed.isalpha() and not squeezed.isdigit()


def _found(text: AnyStr, piece: AnyStr, at: int, form: AnyStr) -> Iterator[tuple[int, int]]:
    """Yields the spans of a piece in a text, with what stands before and after it in its encoding."""
    begin = text.find(piece)
    while begin >= 0:
        first, last, end = begin, at, begin + len(piece)
        while first and last and text[first - 1] == form[last - 1]:
            first, last = first - 1, last - 1
        last = at + len(piece)
        while end < len(text) and last < len(form) and text[end] == form[last]:
            end, last = end + 1, last + 1
        alone = not (text[first - 1 : first].isalnum() or text[end : end + 1].isalnum())
        if len(piece) >= _WORD or alone:
            yield first, end
        begin = text.find(piece, end)
