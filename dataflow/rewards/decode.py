"""Token ids to text, for samples that come without it.

A byte-level tokenizer's text is its tokens' bytes one after another: a table gives it some ten times faster than the
tokenizer itself, which matters where thousands of responses are decoded beside the requests that are in flight. The
table is used only where it gives the tokenizer's own text for every token there is, and for some that go together.

It is kept in cells of equal width too, filled up with a byte that no text has: a row of cells is gathered as numbers
and freed of the filling in one go, some two times faster than bytes are joined.
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
"""Bytes of a cell, and what numpy gathers as one number of that size."""
_FILLING = b"\xff"
_PROBE = " It 's , isn't it ? Is n't . \n  do not  ! I 'm 've 're 'll \" x \" "
"""Text that some tokenizers write otherwise, tidied up or without its outer spaces."""


def decoder(tokenizer: Any) -> Decode:
    """Returns what turns the token ids of responses into texts, special tokens left out.

    Args:
        tokenizer: one of transformers'.
    """

    def library(rows: Sequence[np.ndarray]) -> list[str]:
        texts = tokenizer.batch_decode([row.tolist() for row in rows], skip_special_tokens=True)
        return list(texts) if rows else []  # the library has a text for no rows

    table = _table(tokenizer)
    cells = [_cells(table, width) for width in _WIDTHS]
    narrowest = np.array([_narrowest(piece) for piece in table], dtype=np.uint8)

    def fast(rows: Sequence[np.ndarray]) -> list[str]:
        return [piece.decode("utf-8", errors="replace") for piece in joined(rows)] if rows else []

    def joined(rows: Sequence[np.ndarray]) -> Iterator[bytes]:
        # All rows at a time: numpy lets go of the interpreter in each step, and gets it back behind busy threads.
        ids = np.concatenate(rows)
        ends = np.cumsum([len(row) for row in rows]).tolist()
        width = narrowest.take(ids, mode="clip").max(initial=0)
        if width == len(cells):
            pieces = table.take(ids, mode="clip").tolist()
            return (b"".join(pieces[begin:end]) for begin, end in pairwise([0, *ends]))
        size = cells[width].itemsize
        filled = cells[width].take(ids, mode="clip").tobytes()
        return (filled[begin * size : end * size].translate(None, _FILLING) for begin, end in pairwise([0, *ends]))

    return fast if _same(fast, library, len(table), tokenizer(_PROBE)["input_ids"]) else library


def _table(tokenizer: Any) -> np.ndarray:
    """Returns the bytes of each token as a byte-level tokenizer writes them, by id.

    One more, of nothing, is for all ids behind them: a model may have more than its tokenizer knows.
    """
    added = tokenizer.added_tokens_decoder
    special = {*tokenizer.all_special_ids, *(token for token, piece in added.items() if piece.special)}
    # Some vocabularies have holes, and so ids above the number of their tokens.
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
            table[token] = piece.encode()  # added as it is
    return table


def _narrowest(piece: bytes) -> int:
    """Returns which of the widths a token fits into, or how many there are if none."""
    if _FILLING in piece:
        return len(_WIDTHS)
    return sum(len(piece) > width for width in _WIDTHS)


def _cells(table: np.ndarray, width: int) -> np.ndarray:
    """Returns the table's tokens in cells, cut off where they do not fit."""
    joined = b"".join(piece[:width].ljust(width, _FILLING) for piece in table)
    return np.frombuffer(joined, dtype=_WIDTHS[width])


def _bytes_of_letters() -> dict[str, int]:
    """Returns the byte that each letter of a byte-level vocabulary stands for; a printable one for itself."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(rest)}


def _same(fast: Decode, library: Decode, tokens: int, probe: Sequence[int]) -> bool:
    """Whether both give the same text for all tokens, in order and mixed (bytes of one letter are torn apart)."""
    ids = list(range(tokens))
    mixed = random.Random(0).sample(ids, len(ids))
    rows = [np.asarray(order[i : i + _ROW]) for order in (ids, mixed) for i in range(0, tokens, _ROW)]
    rows.append(np.asarray(probe, dtype=np.int64))
    try:
        return fast(rows) == library(rows)
    except (IndexError, TypeError, ValueError):
        return False
