"""Columns of objects as they travel: pickles, or texts, that are loaded when a column is first read."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dataflow.columns.packed import joined_index
from dataflow.columns.texts import Texts
from dataflow.usercode.copies import is_plain, own_copy
from dataflow.usercode.pickling import dumps


class Pickled:
    """An object column that has not been read: rows of the pickles that it came in.

    Args:
        sources: the pickles, or texts.
        index: which of their rows, counted through all sources; None for all of them in order.
        own: whether each row gets a copy of its object, as those of a prompt's responses do.
    """

    __slots__ = ("index", "own", "sources")

    def __init__(self, sources: Sequence[_Pickle | Texts], index: np.ndarray | None = None, own: bool = False) -> None:
        self.sources = tuple(sources)
        self.index = index
        self.own = own

    def __len__(self) -> int:
        return sum(map(len, self.sources)) if self.index is None else len(self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        if self.index is None:
            return Pickled, (self.sources, None, self.own)
        used, places = np.unique(self.index, return_inverse=True)
        if 2 * len(used) > sum(map(len, self.sources)):
            return Pickled, (self.sources, self.index, self.own)
        # An object that several rows share travels once.
        return Pickled, ((_source(Pickled(self.sources, used).array()),), places.reshape(-1), self.own)

    def rows(self, at: np.ndarray, own: bool = False) -> Pickled:
        """Returns these rows, still pickled."""
        index = (np.arange(len(self)) if self.index is None else self.index)[at]
        return Pickled(self.sources, index, own or self.own)

    @staticmethod
    def concat(columns: Sequence[Pickled]) -> Pickled:
        """Returns the rows of all, still pickled."""
        sources = [source for column in columns for source in column.sources]
        return Pickled(sources, joined_index(columns), any(column.own for column in columns))

    def array(self) -> np.ndarray:
        """Returns the column as an array of its own.

        With ``own`` its objects are copies; otherwise all columns of the same pickles share them.
        """
        if not self.own:
            return self._taken(_Pickle.load)
        array = self._taken(_Pickle.kept)
        # Copies of other objects, such as functions, may share parts.
        copied: np.ndarray = own_copy(array if is_plain(array) else self._taken(_Pickle.fresh))
        return copied

    def _taken(self, load: Callable[[_Pickle], np.ndarray]) -> np.ndarray:
        first, *others = self.sources
        if isinstance(first, Texts) and not others:
            return first.take(self.index)
        arrays = [source.take() if isinstance(source, Texts) else load(source) for source in self.sources]
        array: np.ndarray = np.concatenate(arrays)
        return array if self.index is None else array[self.index]


class _Pickle:
    """A pickle of an array of objects, with the buffers of arrays in it, and the array once it is loaded."""

    __slots__ = ("_kept", "_loaded", "buffers", "data", "rows")

    def __init__(self, rows: int, data: Any, buffers: Sequence[Any]) -> None:
        self.rows, self.data, self.buffers = rows, data, buffers
        self._loaded: np.ndarray | None = None
        self._kept: np.ndarray | None = None

    def __len__(self) -> int:
        return self.rows

    @staticmethod
    def of(array: np.ndarray) -> _Pickle:
        buffers: list[pickle.PickleBuffer] = []
        data = dumps(array, buffers.append)
        return _Pickle(len(array), data, buffers)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self._loaded is not None:  # a reader may have changed its objects
            return _Pickle.of(self._loaded).__reduce_ex__(protocol)
        if protocol < 5:
            # Arrays on a bytearray can be written to when they are loaded.
            buffers = [bytearray(pickle.PickleBuffer(one).raw()) for one in self.buffers]
            return _Pickle, (self.rows, bytes(self.data), buffers)
        return _Pickle, (self.rows, pickle.PickleBuffer(self.data), [pickle.PickleBuffer(one) for one in self.buffers])

    def load(self) -> np.ndarray:
        if self._loaded is None:
            self._loaded = self.fresh()
        return self._loaded

    def kept(self) -> np.ndarray:
        """Returns the array as it was pickled, for readers that copy plain values of it: it is loaded once for all."""
        if self._kept is None:
            self._kept = self.fresh()
        return self._kept

    def fresh(self) -> np.ndarray:
        """Returns the array as it was pickled, whatever the readers of :meth:`load` changed since."""
        array: np.ndarray = pickle.loads(self.data, buffers=self.buffers)
        return array


def objects(column: np.ndarray) -> Pickled | np.ndarray:
    """Returns an array of objects in packed form; one of numbers as it is."""
    return Pickled((_source(column),)) if column.dtype == object else column


def _source(array: np.ndarray) -> _Pickle | Texts:
    return Texts.of(array) or _Pickle.of(array)
