"""Records of a long run: the newest as objects, older ones packed in blocks of columns, in memory or in a file."""

from __future__ import annotations

import itertools
import operator
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, SupportsIndex, TypeVar, overload

from dataflow.columns.block_file import BlockFile, Place
from dataflow.usercode.copies import is_plain

T = TypeVar("T")

_BLOCK = 2048
"""Records of a packed block; up to twice as many are kept as objects."""
_READ = 64
"""Blocks that stay unpacked for the next reader of the newest records, at most."""
_KINDS = {"uint8": (0, 2**8), "uint16": (0, 2**16), "int32": (-(2**31), 2**31), "int64": (-(2**63), 2**63)}
"""Types of columns of integers and their ranges; the first that holds all values is taken."""


class Records(Sequence[T]):
    """A list that only grows, of records that are compared and read as if they were plain objects.

    A record of a reward request takes 400 bytes as an object and about 25 when it is packed. ``+`` and slices
    give lists; a copy grows on its own.

    Args:
        split: returns the values of a record, among them dicts of facts, whose keys differ between records.
        make: returns the record with such values.
        records: the first ones.
        file: for the packed ones, which stay in memory without it, and where it cannot be written.
    """

    def __init__(
        self,
        split: Callable[[T], tuple[Any, ...]],
        make: Callable[..., T],
        records: Iterable[T] = (),
        file: BlockFile | None = None,
    ) -> None:
        self._split, self._make, self._file = split, make, file
        # One attribute, so that other threads can read.
        self._held: tuple[list[Place | bytes | list[T]], list[T]] = ([], [])
        self._read: dict[int, list[T]] = {}
        self.extend(records)

    def append(self, record: T) -> None:
        """Adds a record, which must not change afterwards."""
        blocks, newest = self._held
        newest.append(record)
        if len(newest) >= 2 * _BLOCK:
            self._held = ([*blocks, self._packed(newest[:_BLOCK])], newest[_BLOCK:])

    def extend(self, records: Iterable[T]) -> None:
        """Adds records, see :meth:`append`."""
        for record in list(records):  # which may be these
            self.append(record)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Returns the first index of a record that equals a value, from ``start`` on and before ``stop``.

        Raises:
            ValueError: there is none.
        """
        within = range(len(self))[start:stop]
        for at, record in enumerate(self):  # Sequence's own reads by index, which unpacks a block for each record
            if at in within and (record is value or record == value):
                return at
        raise ValueError(f"{value!r} is not among the {len(self)} records")

    def __len__(self) -> int:
        blocks, newest = self._held
        return len(blocks) * _BLOCK + len(newest)

    def __iter__(self) -> Iterator[T]:
        blocks, newest = self._held
        for at in range(len(blocks)):
            yield from self._unpacked(at)
        yield from newest

    def __reversed__(self) -> Iterator[T]:
        """Yields the newest first; what was read last time is not unpacked again."""
        read: dict[int, list[T]] = {}
        blocks, newest = self._held
        try:
            yield from reversed(newest)
            for at in reversed(range(len(blocks))):
                block = self._unpacked(at)
                if len(read) < _READ:
                    read[at] = block
                yield from reversed(block)
        finally:
            self._read = read

    @overload
    def __getitem__(self, at: SupportsIndex) -> T: ...

    @overload
    def __getitem__(self, at: slice) -> list[T]: ...

    def __getitem__(self, at: SupportsIndex | slice) -> T | list[T]:
        if not isinstance(at, slice):
            blocks, newest = self._held
            block, within = divmod(range(len(blocks) * _BLOCK + len(newest))[operator.index(at)], _BLOCK)
            return (
                self._unpacked(block)[within]
                if block < len(blocks)
                else newest[within + _BLOCK * (block - len(blocks))]
            )
        chosen = range(len(self))[at]
        if chosen.step == 1 and chosen.stop == len(self):  # the newest
            found = list(itertools.islice(reversed(self), len(chosen)))
            return found[::-1]
        return list(self)[at]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Records | list):
            return NotImplemented
        return len(self) == len(other) and all(a is b or a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Sequence[T]) -> list[T]:
        return [*self, *other] if isinstance(other, Records | list) else NotImplemented

    def __radd__(self, other: Sequence[T]) -> list[T]:
        return [*other, *self] if isinstance(other, list) else NotImplemented

    def __iadd__(self, other: Iterable[T]) -> Records[T]:
        self.extend(other)
        return self

    def __copy__(self) -> Records[T]:
        found = Records(self._split, self._make, file=self._file)
        blocks, newest = self._held
        found._held = (list(blocks), list(newest))
        return found

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copy in another process has: all in memory."""
        blocks, newest = self._held
        return {**vars(self), "_held": ([self._block(at) for at in range(len(blocks))], newest), "_file": None}

    def __repr__(self) -> str:
        return f"Records({len(self)})"

    def _packed(self, block: list[T]) -> Place | bytes | list[T]:
        # The facts are the user's, and may be anything: objects of other types are not pickled.
        rows = [self._split(record) for record in block]
        if not is_plain(rows):
            return block
        packed = _pack(rows)
        return (self._file.put(packed) if self._file is not None else None) or packed

    def _block(self, at: int) -> bytes | list[T]:
        """Returns a block as it was packed."""
        block = self._held[0][at]
        if isinstance(block, Place):
            assert self._file is not None
            return self._file.get(block)
        return block

    def _unpacked(self, at: int) -> list[T]:
        if (known := self._read.get(at)) is not None:
            return known
        block = self._block(at)
        return block if isinstance(block, list) else list(itertools.starmap(self._make, _unpack(block)))


def _pack(rows: Sequence[tuple[Any, ...]]) -> bytes:
    """Returns rows as columns."""
    columns = [
        _of_dicts(column) if set(map(type, column)) == {dict} else _column(column) for column in zip(*rows, strict=True)
    ]
    return zlib.compress(pickle.dumps(columns, 5), 1)


def _unpack(block: bytes) -> Iterator[tuple[Any, ...]]:
    return zip(*map(_values, pickle.loads(zlib.decompress(block))), strict=True)


def _of_dicts(values: Sequence[dict[Any, Any]]) -> dict[str, Any]:
    """Returns dicts as their number, and for each set of keys its places and the columns of its values."""
    shapes: dict[tuple[Any, ...], list[int]] = {}
    for at, of in enumerate(values):
        shapes.setdefault((tuple(of), *map(type, of)), []).append(at)  # 1, 1.0 and True are equal
    parts = []
    for (keys, *_types), places in shapes.items():
        inside = zip(*(values[at].values() for at in places), strict=True)
        parts.append((keys, _column(places), [_column(column) for column in inside]))
    return {"count": len(values), "parts": parts}


def _column(values: Sequence[Any]) -> Any:
    """Returns values of one type as an array, texts as (texts, the number of each value's), others as they are."""
    import numpy as np  # here, so that a trace can be read without it

    kinds = set(map(type, values))
    if kinds == {float}:
        return np.array(values, dtype=np.float64)
    if kinds == {int}:
        low, high = min(values), max(values)
        kind = next((kind for kind, (least, end) in _KINDS.items() if least <= low and high < end), None)
        return list(values) if kind is None else np.array(values, dtype=kind)
    if kinds <= {str, type(None)}:
        known: dict[Any, int] = {}
        codes = [known.setdefault(value, len(known)) for value in values]
        return list(known), _column(codes)
    return list(values)


def _values(column: Any) -> list[Any]:
    if isinstance(column, tuple):
        known, codes = column
        return [known[code] for code in codes.tolist()]
    if isinstance(column, dict):
        found: list[dict[Any, Any]] = [{}] * column["count"]
        for keys, places, columns in column["parts"]:
            rows = zip(*map(_values, columns), strict=True) if columns else itertools.repeat(())
            for at, row in zip(_values(places), rows, strict=False):
                found[at] = dict(zip(keys, row, strict=True))
        return found
    return column if isinstance(column, list) else column.tolist()
