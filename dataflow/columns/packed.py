"""Columns in the form in which they travel: without padding, and unread until a stage asks for them.

A stage reads few of the columns of a batch, and often few of the rows: a rank of the trainer those that it computes. So
a column keeps the arrays that it came in, and the rows chosen of them, until it is read; each reader pays for its rows
alone. Packed columns never change: every read makes a tensor of its own, also because a write to Ray's shared memory
would kill the process.

    tokens           Ragged: the values of each row between two runs of padding, in the smallest type that holds them
    masks, positions Progression: the runs alone, if a rule gives their values
    other tensors    Dense: a numpy array
    objects          Pickled: a pickle of its own, which is loaded when the column is first read
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.columns.ragged import Dense, Ragged, bits_of, filled, narrowed

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_BYTES = 1 << 16  # smaller columns are not worth a search for padding
_WORTH = 0.8  # the largest share of values that may be left for padding to be left out


class Packed:
    """A tensor column that has not been read: rows of the arrays that it came in.

    Args:
        sources: the arrays.
        index: which of their rows, counted through all sources; None for all of them in order.
    """

    __slots__ = ("index", "sources")

    def __init__(self, sources: Sequence[Dense | Ragged], index: np.ndarray | None = None) -> None:
        self.sources = tuple(sources)
        self.index = index

    def __len__(self) -> int:
        return sum(map(len, self.sources)) if self.index is None else len(self.index)

    def __reduce__(self) -> tuple[Any, ...]:
        return Packed, (self._whole(),)

    def _whole(self) -> tuple[Dense | Ragged, ...]:
        """Returns sources of these rows alone, in order."""
        if self.index is None:
            return self.sources
        if len(self.sources) == 1:
            return (self.sources[0].take(self.index),)
        # Runs of rows from one source, as long as they are not many more than the sources.
        bounds = np.cumsum([0, *map(len, self.sources)])
        of = np.searchsorted(bounds, self.index, side="right") - 1
        cuts = np.flatnonzero(np.diff(of)) + 1
        if len(self.index) and len(cuts) < max(2 * len(self.sources), len(self.index) // 8):
            runs = np.split(np.arange(len(self.index)), cuts)
            return tuple(self.sources[of[run[0]]].take(self.index[run] - bounds[of[run[0]]]) for run in runs)
        array = self.array()
        return ((_ragged(array) if len(array) else None) or Dense(array),)

    def trimmed(self) -> Packed:
        """Returns the column without the rows of its sources that are not its own."""
        return Packed(self._whole())

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.sources[0].tail)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the tensor, as numpy's."""
        return self.sources[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def rows(self, at: np.ndarray) -> Packed:
        """Returns these rows, still packed."""
        if np.array_equal(at, np.arange(len(self))):
            return Packed(self.sources, self.index)
        return Packed(self.sources, (np.arange(len(self)) if self.index is None else self.index)[at])

    @staticmethod
    def concat(columns: Sequence[Packed]) -> Packed | None:
        """Returns the rows of all, still packed; None if their types or widths differ."""
        if len({(column.dtype, column.shape[1:]) for column in columns}) > 1:
            return None
        return Packed([source for column in columns for source in column.sources], joined_index(columns))

    def tensor(self) -> Tensor:
        """Returns the column as a tensor of its own."""
        import torch

        return torch.from_numpy(self.array())

    def array(self) -> np.ndarray:
        """Returns the column as an array of its own."""
        first = self.sources[0]
        if len(self.sources) == 1 and isinstance(first, Dense):
            return first.array.copy() if self.index is None else first.array[self.index]
        base = first.base
        out = filled(self.shape, base)
        index = np.arange(len(self)) if self.index is None else self.index
        before = 0
        for source in self.sources:
            places = np.flatnonzero((index >= before) & (index < before + len(source)))
            source.fill(out, places, index[places] - before, base)
            before += len(source)
        return out

    def within(self, mask: Packed) -> np.ndarray | None:
        """Returns the values where a mask is not 0, row after row; None if that needs the padding."""
        if not all(len(one.sources) == 1 and isinstance(one.sources[0], Ragged) for one in (self, mask)):
            return None
        (mine,), (other,) = self._whole(), mask._whole()
        return mine.within(other) if isinstance(mine, Ragged) else None

    def nonzero(self, last: int) -> np.ndarray:
        """Returns the number of values other than 0 among the ``last`` ones of each row, int64 ``[rows]``."""
        found: np.ndarray = np.concatenate([source.nonzero(last) for source in self.sources])
        return found if self.index is None else found[self.index]

    def last(self) -> np.ndarray:
        """Returns the column of the last value of each row that is not 0, int64 ``[rows]``; 0 if all are."""
        found: np.ndarray = np.concatenate([source.last() for source in self.sources])
        return found if self.index is None else found[self.index]

    def masked(self, tensor: Tensor) -> Packed | None:
        """Returns a matrix of the same shape, 0 where this column is, without a search for its padding.

        None if the column is not one matrix with padding of 0.
        """
        (whole, *others) = self._whole()
        found = whole.masked(tensor.numpy()) if isinstance(whole, Ragged) and not others else None
        return None if found is None else Packed((found,))


def joined_index(columns: Sequence[Any]) -> np.ndarray | None:
    """Returns the rows of all columns, counted through the sources of all; None for all of them in order."""
    if all(column.index is None for column in columns):
        return None
    found, before = [], 0
    for column in columns:
        found.append((np.arange(len(column)) if column.index is None else column.index) + before)
        before += sum(map(len, column.sources))
    whole: np.ndarray = np.concatenate(found)
    return whole


def packed(column: Tensor) -> Packed | Tensor:
    """Returns a tensor in packed form; one that numpy cannot represent, or that needs gradients, as it is."""
    if column.requires_grad:
        return column
    try:
        array: np.ndarray = column.contiguous().numpy()
    except (TypeError, RuntimeError):  # bfloat16, a sparse tensor, one on a GPU
        return column
    return Packed((_ragged(array) or Dense(array),))


def _ragged(array: np.ndarray) -> Ragged | None:
    """Returns a matrix without the padding at both ends of its rows, if that saves enough."""
    if array.ndim != 2 or array.nbytes < _LEAST_BYTES or array.dtype.kind not in "iufb":
        return None
    rows, width = array.shape
    bits = bits_of(array)
    other = bits != bits[:, -1:]
    stops = np.where(other.any(axis=1), width - other[:, ::-1].argmax(axis=1), 0)
    np.not_equal(bits, bits[:, :1], out=other)
    starts = np.where(other.any(axis=1), other.argmax(axis=1), 0)
    lengths = stops - starts
    if lengths.sum() > _WORTH * array.size:
        return None
    values = np.empty(int(lengths.sum()), array.dtype)
    end = 0
    for row, start, stop in zip(range(rows), starts.tolist(), stops.tolist(), strict=True):
        begin, end = end, end + stop - start
        values[begin:end] = array[row, start:stop]
    return Ragged(narrowed(values), lengths, starts, width, array.dtype, _side(array[:, 0]), _side(array[:, -1]))


def _side(column: np.ndarray) -> np.ndarray:
    """Returns the values of padding, or the one that all rows have."""
    return column[0] if (bits_of(column) == bits_of(column)[0]).all() else column.copy()
