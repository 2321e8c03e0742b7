"""Columns of texts as they travel: one after another in a buffer, of which a reader takes its rows alone."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

_CODE = ("utf-8", "surrogatepass")  # a str may have lone surrogates, which a pickle keeps, too


def encoded(text: str) -> bytes:
    """Returns a text in the encoding of :class:`Texts`."""
    return text.encode(*_CODE)


class Texts:
    """Texts that are not read yet.

    Args:
        data: of all texts, one after another, in UTF-8.
        ends: bytes up to the end of each text, int64 ``[rows]``.
    """

    __slots__ = ("data", "ends")

    def __init__(self, data: Any, ends: np.ndarray) -> None:
        self.data, self.ends = data, ends

    def __len__(self) -> int:
        return len(self.ends)

    @staticmethod
    def of(array: np.ndarray) -> Texts | None:
        """Returns an array of objects in this form; None unless all are texts, each an object of its own.

        In a pickle, a text that many rows share takes two bytes a row.
        """
        values = array.tolist()
        if {*map(type, values)} != {str} or len({*map(id, values)}) < len(values):
            return None
        return Texts.joined([*map(encoded, values)])

    @staticmethod
    def joined(pieces: Sequence[bytes]) -> Texts:
        """Returns texts that are encoded already, see :func:`encoded`."""
        return Texts(b"".join(pieces), np.cumsum(np.array([*map(len, pieces)], dtype=np.int64)))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Texts, (bytes(self.data) if protocol < 5 else pickle.PickleBuffer(self.data), self.ends)

    def take(self, rows: np.ndarray | None = None) -> np.ndarray:
        """Returns the texts of rows, of all in order by default, as an array of objects."""
        begins, ends = np.append(0, self.ends)[: len(self)], self.ends
        if rows is not None:
            begins, ends = begins[rows], ends[rows]
        data = memoryview(self.data)
        found = np.empty(len(ends), dtype=object)
        found[:] = [str(data[begin:end], *_CODE) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return found
