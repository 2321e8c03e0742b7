"""Matrices in the form in which they travel: whole, as the runs of values in their rows, or as a rule for these."""

from __future__ import annotations

from typing import Any

import numpy as np


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
        values: of all rows, in order; several matrices may share one array, of which each has parts.
        lengths: number of values of each row, int64 ``[rows]``.
        starts: column of the first value of each row, int64 ``[rows]``.
        width: number of columns.
        dtype: of the matrix; that of ``values`` may be smaller.
        left, right: the value before and after those of a row; one for all, or ``[rows]``.
        ends: of each row's values in ``values``, int64 ``[rows]``; None if they follow one another without gaps.
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
        ends: np.ndarray | None = None,
    ) -> None:
        self.values, self.lengths, self.starts = values, lengths, starts
        self.width, self.dtype = width, np.dtype(dtype)
        self.left, self.right = np.asarray(left, self.dtype), np.asarray(right, self.dtype)
        self.ends = np.cumsum(lengths) if ends is None else ends

    def __len__(self) -> int:
        return len(self.lengths)

    def __reduce__(self) -> tuple[Any, ...]:
        ends = self.ends if self._gaps() else None
        sides = self.left, self.right
        return Ragged, (self.values, self.lengths, self.starts, self.width, self.dtype, *sides, ends)

    def _gaps(self) -> bool:
        """Whether ``values`` has others than those of this matrix."""
        return bool(len(self.values) != self.lengths.sum())

    @property
    def tail(self) -> tuple[int, ...]:
        return (self.width,)

    def take(self, rows: np.ndarray) -> Ragged:
        lengths, ends = self.lengths[rows], self.ends[rows]
        values = self._joined(ends - lengths, ends)
        return Ragged(values, lengths, self.starts[rows], self.width, self.dtype, *self._sides(rows))

    def _joined(self, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Returns parts of the values one after another, not copied if they are one part."""
        # Parts that follow one another are one piece. Numpy's index arithmetic for single values takes five times as
        # long as copies of pieces.
        cuts = np.flatnonzero(begins[1:] != ends[:-1])
        begins, ends = begins[np.append(0, cuts + 1)[: len(begins)]], ends[np.append(cuts, -1)[: len(ends)]]
        pieces = [self.values[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([self.values[:0], *pieces])

    def _sides(self, rows: np.ndarray) -> list[np.ndarray]:
        return [side if side.ndim == 0 else side[rows] for side in (self.left, self.right)]

    def _flat(self) -> np.ndarray:
        """Returns the values of the rows alone, one after another."""
        return self._joined(self.ends - self.lengths, self.ends) if self._gaps() else self.values

    def _pieces(self, rows: np.ndarray) -> list[np.ndarray]:
        """Returns the values of each of these rows."""
        ends = self.ends[rows]
        begins = (ends - self.lengths[rows]).tolist()
        return [self.values[begin:end] for begin, end in zip(begins, ends.tolist(), strict=True)]

    def _all(self) -> bool:
        """Whether no value is 0."""
        return bool(self.values.all()) or bool(self._flat().all())

    @property
    def base(self) -> np.ndarray:
        one = self.left.ndim == self.right.ndim == 0 and bits_of(self.left) == bits_of(self.right)
        return self.left if one else np.zeros((), self.dtype)

    def fill(self, out: np.ndarray, places: np.ndarray, rows: np.ndarray, base: np.ndarray) -> None:
        starts = self.starts[rows]
        stops = starts + self.lengths[rows]
        # A copy of each row: numpy's index arithmetic for single values takes three times as long.
        at = zip(places.tolist(), starts.tolist(), stops.tolist(), self._pieces(rows), strict=True)
        for place, start, stop, piece in at:
            out[place, start:stop] = piece
        left, right = (np.broadcast_to(side, len(self))[rows] for side in (self.left, self.right))
        for row in np.flatnonzero((bits_of(left) != bits_of(base)) & (starts > 0)).tolist():
            out[places[row], : starts[row]] = left[row]
        for row in np.flatnonzero((bits_of(right) != bits_of(base)) & (stops < self.width)).tolist():
            out[places[row], stops[row] :] = right[row]

    def within(self, mask: Dense | Ragged) -> np.ndarray | None:
        """Returns the values where a mask is not 0; None unless its values are all that is not 0 there."""
        if not isinstance(mask, Ragged) or mask.left.any() or mask.right.any() or not mask._all():
            return None
        if not (np.array_equal(mask.starts, self.starts) and np.array_equal(mask.lengths, self.lengths)):
            return None
        found: np.ndarray = self._flat().astype(self.dtype)
        return found

    def nonzero(self, last: int) -> np.ndarray:
        first = self.width - last
        stops = self.starts + self.lengths
        skipped = np.clip(first - self.starts, 0, self.lengths)
        found: np.ndarray
        if self._all():  # as in a mask of a response without tools
            found = self.lengths - skipped
        else:
            counted, ends = np.concatenate([[0], np.cumsum(self._flat() != 0)]), np.cumsum(self.lengths)
            found = counted[ends] - counted[ends - self.lengths + skipped]
        found += np.where(self.left != 0, np.clip(self.starts - first, 0, None), 0)
        found += np.where(self.right != 0, self.width - np.clip(stops, first, None), 0)
        return found

    def last(self) -> np.ndarray:
        if self.left.any() or self.right.any() or not self._all():
            return Dense(self.array()).last()
        found: np.ndarray = np.where(self.lengths > 0, self.starts + self.lengths - 1, 0)
        return found

    def array(self) -> np.ndarray:
        """Returns the matrix."""
        base, rows = self.base, np.arange(len(self))
        out = filled((len(self), self.width), base)
        self.fill(out, rows, rows, base)
        return out

    def masked(self, array: np.ndarray) -> Ragged | None:
        """Returns a matrix where this one is not 0, and 0 elsewhere; None if the padding of this one is not 0."""
        if self.left.any() or self.right.any():
            return None
        stops = (self.starts + self.lengths).tolist()
        pieces = [row[start:stop] for row, start, stop in zip(array, self.starts.tolist(), stops, strict=True)]
        values = np.concatenate([array.reshape(-1)[:0], *pieces])
        if not self._all():
            values[self._flat() == 0] = 0
        return Ragged(values, self.lengths, self.starts, self.width, array.dtype)


class Progression(Ragged):
    """A matrix of integers whose rows have the values first, first + step, ...: as a mask, or positions of tokens.

    Args:
        first: the first value of each row.
        step: between values.
        lengths, starts, width, left, right: as those of :class:`Ragged`.
    """

    __slots__ = ("first", "step")

    def __init__(
        self, first: int, step: int, lengths: np.ndarray, starts: np.ndarray, width: int, left: Any = 0, right: Any = 0
    ) -> None:
        super().__init__(np.zeros(0, np.int64), lengths, starts, width, np.dtype(np.int64), left, right)
        self.first, self.step = first, step

    def __reduce__(self) -> tuple[Any, ...]:
        return Progression, (self.first, self.step, self.lengths, self.starts, self.width, self.left, self.right)

    def take(self, rows: np.ndarray) -> Progression:
        lengths, starts = self.lengths[rows], self.starts[rows]
        return Progression(self.first, self.step, lengths, starts, self.width, *self._sides(rows))

    def _flat(self) -> np.ndarray:
        if not self.step:
            return np.full(int(self.lengths.sum()), self.first)
        return np.concatenate([self.values, *self._pieces(np.arange(len(self)))])

    def _pieces(self, rows: np.ndarray) -> list[np.ndarray]:
        longest = self.first + self.step * np.arange(self.lengths.max(initial=0))
        return [longest[:length] for length in self.lengths[rows].tolist()]

    def _all(self) -> bool:
        return bool(self.first) if not self.step else bool(self._flat().all())


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


def filled(shape: tuple[int, ...], base: np.ndarray) -> np.ndarray:
    """Returns an array whose values are all ``base``."""
    # numpy gets zeros from the system, which costs less than writing them.
    return np.full(shape, base) if bits_of(base) else np.zeros(shape, base.dtype)


def bits_of(array: np.ndarray) -> np.ndarray:
    """Returns the bits of floats as integers: 0.0 then differs from -0.0, and equal NaNs are equal."""
    if array.dtype.kind != "f" or array.dtype.itemsize not in (2, 4, 8):
        return array
    return array.view(f"i{array.dtype.itemsize}")
