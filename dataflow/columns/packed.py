"""Columns in the form in which they travel: without padding, and unread until a stage asks for them.

A stage reads few of the columns of a batch, and often few of the rows: a rank of the trainer those that it computes. So
a column keeps the arrays that it came in, and the rows chosen of them, until it is read; each reader pays for its rows
alone. Packed columns never change: every read makes a tensor of its own, also because a write to Ray's shared memory
would kill the process.

    tokens, masks    Ragged: the values of each row between two runs of padding, in the smallest type that holds them
    other tensors    Dense: a numpy array
    objects          Pickled: a pickle of its own, which is loaded when the column is first read
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

_LEAST_BYTES = 1 << 16  # smaller columns are not worth a search for padding
_WORTH = 0.8  # the largest share of values that may be left for padding to be left out


class Dense:
    """An array with all its values."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    def __reduce__(self) -> tuple[Any, ...]:
        return Dense, (self.array,)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype

    @property
    def tail(self) -> tuple[int, ...]:
        """The shape of a row."""
        return self.array.shape[1:]

    def take(self, rows: np.ndarray) -> Dense:
        return Dense(self.array[rows])

    @property
    def base(self) -> np.ndarray:
        """The value of an array before :meth:`fill`."""
        return np.zeros((), self.dtype)

    def fill(self, out: np.ndarray, places: np.ndarray, rows: np.ndarray, base: np.ndarray) -> None:
        """Writes rows to their places in an array whose values are all ``base``."""
        out[places] = self.array[rows]

    def nonzero(self, last: int) -> np.ndarray:
        """Returns the number of values other than 0 among the ``last`` ones of each row."""
        found: np.ndarray = np.count_nonzero(self.array[:, self.array.shape[1] - last :], axis=1)
        return found

    def last(self) -> np.ndarray:
        """Returns the column of the last value of each row that is not 0; 0 if all are."""
        there = self.array != 0
        if not there.shape[1]:
            return np.zeros(len(there), dtype=np.int64)
        last = there.shape[1] - 1 - there[:, ::-1].argmax(axis=1)
        found: np.ndarray = np.where(there[np.arange(len(there)), last], last, 0)
        return found


class Ragged:
    """A matrix of rows that each have one run of values, and the same value everywhere before it and after it.

    Args:
        values: of all rows, one after another.
        lengths: number of values of each row, int64 ``[rows]``.
        starts: column of the first value of each row, int64 ``[rows]``.
        width: number of columns.
        dtype: of the matrix; that of ``values`` may be smaller.
        left, right: the value before and after those of a row; one for all, or ``[rows]``.
    """

    __slots__ = ("dtype", "ends", "left", "lengths", "right", "starts", "values", "width")

    def __init__(
        self,
        values: np.ndarray,
        lengths: np.ndarray,
        starts: np.ndarray,
        width: int,
        dtype: np.dtype[Any],
        left: Any = 0,
        right: Any = 0,
    ) -> None:
        self.values, self.lengths, self.starts = values, lengths, starts
        self.width, self.dtype = width, np.dtype(dtype)
        self.left, self.right = np.asarray(left, self.dtype), np.asarray(right, self.dtype)
        self.ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        sides = self.left, self.right
        return Ragged, (self.values, self.lengths, self.starts, self.width, self.dtype, *sides)

    @property
    def tail(self) -> tuple[int, ...]:
        return (self.width,)

    def take(self, rows: np.ndarray) -> Ragged:
        lengths, ends = self.lengths[rows], self.ends[rows]
        # Rows that follow one another are one piece. Numpy's index arithmetic for single values takes five times as
        # long as copies of pieces.
        cuts = np.flatnonzero(np.diff(rows) != 1)
        begins, stops = (ends - lengths)[np.append(0, cuts + 1)[: len(rows)]], ends[np.append(cuts, -1)[: len(rows)]]
        pieces = [self.values[begin:stop] for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)]
        values = pieces[0] if len(pieces) == 1 else np.concatenate([self.values[:0], *pieces])
        left, right = (side if side.ndim == 0 else side[rows] for side in (self.left, self.right))
        return Ragged(values, lengths, self.starts[rows], self.width, self.dtype, left, right)

    @property
    def base(self) -> np.ndarray:
        one = self.left.ndim == self.right.ndim == 0 and _bits(self.left) == _bits(self.right)
        return self.left if one else np.zeros((), self.dtype)

    def fill(self, out: np.ndarray, places: np.ndarray, rows: np.ndarray, base: np.ndarray) -> None:
        starts, ends, lengths = self.starts[rows], self.ends[rows], self.lengths[rows]
        begins, stops = ends - lengths, starts + lengths
        # A copy of each row: numpy's index arithmetic for single values takes three times as long.
        at = zip(places.tolist(), starts.tolist(), stops.tolist(), begins.tolist(), ends.tolist(), strict=True)
        for place, start, stop, begin, end in at:
            out[place, start:stop] = self.values[begin:end]
        left, right = (np.broadcast_to(side, len(self))[rows] for side in (self.left, self.right))
        for row in np.flatnonzero((_bits(left) != _bits(base)) & (starts > 0)).tolist():
            out[places[row], : starts[row]] = left[row]
        for row in np.flatnonzero((_bits(right) != _bits(base)) & (stops < self.width)).tolist():
            out[places[row], stops[row] :] = right[row]

    def within(self, mask: Dense | Ragged) -> np.ndarray | None:
        """Returns the values where a mask is not 0; None unless its values are all that is not 0 there."""
        if not isinstance(mask, Ragged) or mask.left.any() or mask.right.any() or not mask.values.all():
            return None
        if not (np.array_equal(mask.starts, self.starts) and np.array_equal(mask.lengths, self.lengths)):
            return None
        found: np.ndarray = self.values.astype(self.dtype)
        return found

    def nonzero(self, last: int) -> np.ndarray:
        first = self.width - last
        begins, stops = self.ends - self.lengths, self.starts + self.lengths
        skipped = np.clip(first - self.starts, 0, self.lengths)
        found: np.ndarray
        if self.values.all():  # as in a mask of a response without tools
            found = self.lengths - skipped
        else:
            counted = np.concatenate([[0], np.cumsum(self.values != 0)])
            found = counted[self.ends] - counted[begins + skipped]
        found += np.where(self.left != 0, np.clip(self.starts - first, 0, None), 0)
        found += np.where(self.right != 0, self.width - np.clip(stops, first, None), 0)
        return found

    def last(self) -> np.ndarray:
        if self.left.any() or self.right.any() or not self.values.all():
            return Dense(Packed([self]).array()).last()
        found: np.ndarray = np.where(self.lengths > 0, self.starts + self.lengths - 1, 0)
        return found

    def alike(self, array: np.ndarray) -> Ragged | None:
        """Returns a matrix that is 0 wherever this one has padding, which is 0; None if the padding is not."""
        if self.left.any() or self.right.any():
            return None
        stops = (self.starts + self.lengths).tolist()
        pieces = [row[start:stop] for row, start, stop in zip(array, self.starts.tolist(), stops, strict=True)]
        values = np.concatenate([array.reshape(-1)[:0], *pieces])
        return Ragged(values, self.lengths, self.starts, self.width, array.dtype)


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
        out = np.full(self.shape, base) if _bits(base) else np.zeros(self.shape, self.dtype)
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

    def alike(self, tensor: Tensor) -> Packed | None:
        """Returns a matrix of the same shape in the same runs, without a search for its padding.

        Args:
            tensor: which is 0 wherever this column, a mask, has padding.

        Returns:
            None if the column is not one matrix with padding of 0.
        """
        (whole, *others) = self._whole()
        found = whole.alike(tensor.numpy()) if isinstance(whole, Ragged) and not others else None
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
    bits = _bits(array)
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
    return column[0] if (_bits(column) == _bits(column)[0]).all() else column.copy()


def narrowed(values: np.ndarray) -> np.ndarray:
    """Returns integers in the smallest type that holds them all.

    >>> narrowed(np.array([0, 1, 300])).dtype
    dtype('int16')
    """
    if values.dtype.kind != "i" or not len(values):
        return values
    least, most = int(values.min()), int(values.max())
    for kind in (np.int8, np.int16, np.int32):
        if np.iinfo(kind).min <= least and most <= np.iinfo(kind).max:
            return values.astype(kind, copy=False)
    return values


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns the bits of floats as integers: 0.0 then differs from -0.0, and equal NaNs are equal."""
    if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8):
        return array
    return array.view(f"i{array.dtype.itemsize}")
