"""Decodes token ids, for samples that have no text.

The text of a byte-level tokenizer is the concatenation of its tokens' bytes. A table of them is about ten times faster
than the tokenizer, which matters when thousands of responses are decoded while requests are in flight. The table is
used only if it reproduces the tokenizer's text for every token and for some combinations.

The table also exists with cells of equal width, padded with a byte that no text contains: a row of cells is gathered as
numbers and its padding removed at once, about two times faster than joining bytes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

Decode: TypeAlias = Callable[[Sequence[np.ndarray]], list[str]]
_ROW = 512
_WIDTHS = {8: np.uint64, 16: np.complex128}
"""Bytes of a cell, and the numpy type of that size."""
_PADDING = b"\xff"
_PROBE = " It 's , isn't it ? Is n't . \n  do not  ! I 'm 've 're 'll \" x \" "
"""Text that some tokenizers change: tidied up, or without its outer spaces."""


def decoder(tokenizer: Any) -> Decode:
    """Returns a function that decodes the token ids of responses, without special tokens.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def library(rows: Sequence[np.ndarray]) -> list[str]:
        texts = tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True)
        return list(texts) if rows else []  # the library returns one text for no rows

    table = _table(tokenizer)
    cells = [_cells(table, width) for width in _WIDTHS]
    narrowest = np.array([_narrowest(piece) for piece in table], dtype=np.uint8)

    def fast(rows: Sequence[np.ndarray]) -> list[str]:
        return [piece.decode("utf-8", errors="replace") for piece in joined(rows)] if rows else []

    def joined(rows: Sequence[np.ndarray]) -> Iterator[bytes]:
        # All rows at once: each numpy call releases the GIL, and may have to wait for busy threads to get it back.
        ids = np.concatenate(rows)
        ends = np.cumsum([len(row) for row in rows]).tolist()
        width = narrowest.take(ids, mode="clip").max(initial=0)
        if width == len(cells):
            pieces = table.take(ids, mode="clip").tolist()
            return (b"".join(pieces[begin:end]) for begin, end in pairwise([0, *ends]))
        size = cells[width].itemsize
        padded = cells[width].take(ids, mode="clip").tobytes()
        return (padded[begin * size : end * size].translate(None, _PADDING) for begin, end in pairwise([0, *ends]))

    return fast if _same(fast, library, len(table), tokenizer(_PROBE)["input_ids"]) else library


def _table(tokenizer: Any) -> np.ndarray:
    """Returns the bytes of each token of a byte-level tokenizer, by id.

    The last entry is empty, for all larger ids: a model may have more token ids than its tokenizer.
    """
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(token for token, piece in added.items() if piece.special)}
    # Vocabularies with holes have ids above the number of their tokens.
    pieces = tokenizer.convert_ids_to_tokens(list(range(max(tokenizer.get_vocab().values(), default=-1) + 1)))
    of = _bytes_of_letters()
    table = np.empty(len(pieces) + 1, dtype=object)
    table[-1] = b""
    for token, piece in enumerate(pieces):
        if piece is None or token in special:
            table[token] = b""
        elif all(letter in of for letter in piece):
            table[token] = bytes(of[letter] for letter in piece)
        else:
            table[token] = piece.encode()  # an added token stands for itself
    return table


def _narrowest(piece: bytes) -> int:
    """Returns the index of the smallest width that a token fits into; the number of widths if it fits none."""
    if _PADDING in piece:
        return len(_WIDTHS)
    return sum(len(piece) > width for width in _WIDTHS)


def _cells(table: np.ndarray, width: int) -> np.ndarray:
    """Returns the table's tokens in cells of a width, truncated if they do not fit."""
    joined = b"".join(piece[:width].ljust(width, _PADDING) for piece in table)
    return np.frombuffer(joined, dtype=_WIDTHS[width])


def _bytes_of_letters() -> dict[str, int]:
    """Returns the byte of each letter of a byte-level vocabulary; printable bytes are their own letters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _same(fast: Decode, library: Decode, tokens: int, probe: Sequence[int]) -> bool:
    """Whether both decode all tokens alike, in order and shuffled (which separates the bytes of a character)."""
    ids = list(range(tokens))
    mixed = random.Random(0).sample(ids, len(ids))
    rows = [np.asarray(order[i : i + _ROW]) for order in (ids, mixed) for i in range(0, tokens, _ROW)]
    rows.append(np.asarray(probe, dtype=np.int64))
    try:
        return fast(rows) == library(rows)
    except (IndexError, TypeError, ValueError):
        return False
