"""Columns: how a batch stores the values of its rows, in a stage, in Ray's object store and in a pickle alike.

A column that no stage has read is one array, without padding, and for each row where its values begin and how many it
has:

    values    7  8  9 | 4  5 | 1  2  3  4      Ragged: tokens, masks, log-probs; Dense: rows of any other tensor;
    begins    0         3      5               Texts: bytes in UTF-8; Objects: bytes of a pickle for each object
    lengths   3         2      4

So rows are chosen by their begins and lengths: no value is copied or decoded for a stage that does not read it, a row
that occurs several times is stored once, and columns may be parts of one array (a prompt, its response, and both). A
pickle keeps the arrays out of band, and Ray its readers on shared memory. Columns never change: what is read of them is
a copy, as a write to Ray's shared memory would kill the process.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np

from dataflow.usercode.copies import own_copy
from dataflow.usercode.pickling import dumps_each

if TYPE_CHECKING:
    from torch import Tensor

V = TypeVar("V")
_TEXT = ("utf-8", "surrogatepass")  # a str may have lone surrogates


@dataclass(eq=False)
class Column:
    """Rows that are parts of one array.

    Args:
        values: of all rows, and perhaps of others.
        begins: of each row in ``values``, int64 ``[rows]``.
        lengths: number of values of each row, int64 ``[rows]``.
    """

    values: np.ndarray
    begins: np.ndarray
    lengths: np.ndarray

    _OF_ROWS: ClassVar[tuple[str, ...]] = ("begins", "lengths")

    def __len__(self) -> int:
        return len(self.begins)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self.compact())

    def rows(self, at: np.ndarray) -> Self:
        """Returns the rows of these numbers."""
        return replace(self, **{name: getattr(self, name)[at] for name in self._OF_ROWS})

    def flat(self) -> np.ndarray:
        """Returns the values of the rows, one row after another."""
        begins, ends = self.begins, self.begins + self.lengths
        # Rows that follow one another are one piece. Copies of pieces take a fifth of the time of numpy's fancy index.
        last = np.append(np.flatnonzero(begins[1:] != ends[:-1]), -1)[: len(begins)]
        first = np.append(0, last[:-1] + 1)[: len(begins)]
        pieces = [self.values[b:e] for b, e in zip(begins[first].tolist(), ends[last].tolist(), strict=True)]
        return pieces[0] if len(pieces) == 1 else np.concatenate([self.values[:0], *pieces])

    def compact(self) -> Self:
        """Returns the column without the values of other rows, if these are more than half of the array.

        Below that it keeps the array, which other columns of the batch may share.
        """
        ends, total = np.cumsum(self.lengths), int(self.lengths.sum())
        if total == len(self.values) and np.array_equal(self.begins, ends - self.lengths):
            return self
        parts, at = np.unique(self.begins + 1j * self.lengths, return_inverse=True)  # pairs, each once
        begins, lengths = parts.real.astype(np.int64), parts.imag.astype(np.int64)
        if 2 * int(lengths.sum()) >= len(self.values):
            return self
        values = Column(self.values, begins, lengths).flat()
        return replace(self, values=values, begins=(np.cumsum(lengths) - lengths)[at])

    @staticmethod
    def concat(columns: Sequence[Column]) -> Column | None:
        """Returns the rows of all columns; None if they are of different kinds, such as widths."""
        if len({column.kind for column in columns}) > 1:
            return None
        parts = [column.compact() for column in columns]
        shifts = np.cumsum([0, *(len(part.values) for part in parts)])
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in parts[0]._OF_ROWS}
        joined["begins"] = np.concatenate([p.begins + shift for p, shift in zip(parts, shifts[:-1], strict=True)])
        return replace(parts[0], values=np.concatenate([part.values for part in parts]), **joined)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What columns must have in common to be joined."""
        return (type(self),)

    def read(self) -> Any:
        """Returns a tensor, or an array of objects, that shares no memory with the column."""
        raise NotImplementedError


class Dense(Column):
    """A tensor. Its rows are rows of ``values``, one each."""

    @staticmethod
    def of(tensor: Tensor) -> Dense | Tensor:
        """Returns the column of a tensor, on its memory; the tensor itself if numpy has none of its kind."""
        if tensor.requires_grad:
            return tensor
        try:
            values = tensor.numpy()
        except (TypeError, RuntimeError):  # bfloat16, a sparse tensor, one on a GPU
            return tensor
        rows = np.arange(len(values))
        return Dense(np.ascontiguousarray(values), rows, np.ones_like(rows))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.values.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def kind(self) -> tuple[Any, ...]:
        return (Dense, self.dtype, *self.shape[1:])

    def read(self) -> Tensor:
        import torch

        return torch.from_numpy(self.values[self.begins])


@dataclass(eq=False)
class Ragged(Column):
    """A matrix, each of whose rows has its values in consecutive columns, and padding before and after them.

    Args:
        values: see :class:`Column`; their type may be smaller than the matrix's.
        starts: column of the first value of each row, int64 ``[rows]``.
        width: number of columns.
        dtype: of the matrix.
        pad: the value of the padding.
    """

    starts: np.ndarray
    width: int
    dtype: np.dtype[Any]
    pad: int = 0

    _OF_ROWS: ClassVar[tuple[str, ...]] = ("begins", "lengths", "starts")

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), self.width)

    @property
    def kind(self) -> tuple[Any, ...]:
        return (Ragged, self.width, self.dtype, self.pad)

    def read(self) -> Tensor:
        import torch

        # numpy gets zeros from the system, which takes less time than writing them.
        found = np.full(self.shape, self.pad, self.dtype) if self.pad else np.zeros(self.shape, self.dtype)
        rows = zip(found, *(getattr(self, name).tolist() for name in self._OF_ROWS), strict=True)
        for row, begin, length, start in rows:
            row[start : start + length] = self.values[begin : begin + length]
        return torch.from_numpy(found)

    def nonzero(self, last: int) -> np.ndarray:
        """Returns the number of values other than 0 among the ``last`` ones of each row, of a matrix padded with 0."""
        skipped = np.clip(self.width - last - self.starts, 0, self.lengths)
        found: np.ndarray = self.lengths - skipped
        if not self.values.all():  # as in a mask of responses with tools' answers
            counted = np.append(0, np.cumsum(self.values != 0))
            found = counted[self.begins + self.lengths] - counted[self.begins + skipped]
        return found

    def last(self) -> np.ndarray:
        """Returns the column of the last value of each row that is not 0, of a matrix padded with 0; 0 if all are."""
        last = self.begins + self.lengths - 1
        if not self.values.all():
            places = np.append(-1, np.flatnonzero(self.values))
            last = places[np.searchsorted(places, last, side="right") - 1]
        return np.where(last >= self.begins, self.starts + last - self.begins, 0)

    def within(self, mask: Ragged) -> np.ndarray | None:
        """Returns the values where a mask is not 0, row after row; None if the mask is 0 at some, or not at others."""
        if not np.array_equal(mask.starts, self.starts) or not np.array_equal(mask.lengths, self.lengths):
            return None
        return self.flat().astype(self.dtype) if mask.flat().all() and not mask.pad else None


class Texts(Column):
    """Texts, as bytes."""

    @staticmethod
    def of(texts: Sequence[str]) -> Texts:
        """Returns the column of texts; one object in several rows is stored once."""
        distinct, at = _distinct(texts)
        pieces = [text.encode(*_TEXT) for text in distinct]
        lengths = np.array([*map(len, pieces)], dtype=np.int64)
        values = np.frombuffer(b"".join(pieces), np.uint8)
        return Texts(values, (np.cumsum(lengths) - lengths)[at], lengths[at])

    def read(self) -> np.ndarray:
        return objects([str(part, *_TEXT) for part in _parts(self)])


class Objects(Column):
    """Objects of any type, each as bytes of a pickle of its own."""

    @staticmethod
    def of(values: Sequence[Any]) -> Objects:
        """Returns the column of objects; one in several rows is pickled once."""
        distinct, at = _distinct(values)
        data, ends = dumps_each(distinct)
        bounds = np.array([0, *ends], dtype=np.int64)
        return Objects(np.frombuffer(data, np.uint8), bounds[:-1][at], np.diff(bounds)[at])

    def read(self) -> np.ndarray:
        """Returns the objects; rows of one pickle get copies, so that a change to one does not show in others."""
        known: dict[int, Any] = {}
        found = []
        for begin, part in zip(self.begins.tolist(), _parts(self), strict=True):
            there = begin in known
            found.append(own_copy(known[begin]) if there else known.setdefault(begin, pickle.loads(part)))
        return objects(found)


def column_of(read: Any) -> Any:
    """Returns the column of a tensor or an array of objects; itself if it has none, such as an array of numbers."""
    if is_tensor(read):
        return Dense.of(read)
    if not isinstance(read, np.ndarray) or read.dtype != object:
        return read
    values = read.tolist()
    return Texts.of(values) if {*map(type, values)} == {str} else Objects.of(values)


def is_tensor(value: Any) -> bool:
    """True for a tensor. Does not import torch, which takes seconds: where it is not imported, there is no tensor."""
    return isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ()))


def objects(values: Any) -> np.ndarray:
    """Returns a 1-D array of objects; numpy alone would turn a list of lists of equal length into a matrix."""
    if isinstance(values, np.ndarray) and values.ndim == 1:
        return values
    array = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        array[row] = value
    return array


class Columns(Mapping[str, V]):
    """Tensors or arrays by name; a :class:`Column` is read at the first access."""

    __slots__ = ("raw",)

    def __init__(self, raw: dict[str, Any]) -> None:
        self.raw = raw
        """The columns as they are, read or not."""

    def __getitem__(self, name: str) -> V:
        column = self.raw[name]
        if isinstance(column, Column):
            column = self.raw[name] = column.read()
        return column  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        return name in self.raw

    def __iter__(self) -> Iterator[str]:
        return iter(self.raw)

    def __len__(self) -> int:
        return len(self.raw)


def _distinct(values: Sequence[V]) -> tuple[list[V], np.ndarray]:
    """Returns each object once, and which of these each value is."""
    known: dict[int, int] = {}
    at = np.array([known.setdefault(id(value), len(known)) for value in values], dtype=np.int64)
    return list({id(value): value for value in values}.values()), at


def _parts(column: Column) -> Iterator[memoryview]:
    data = memoryview(column.values.data)
    for begin, length in zip(column.begins.tolist(), column.lengths.tolist(), strict=True):
        yield data[begin : begin + length]
