"""Columns that are unpacked when they are first read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from dataflow.columns.packed import Packed
from dataflow.columns.pickled import Pickled

V = TypeVar("V")


class LazyColumns(Mapping[str, V]):
    """Tensors or arrays by name; a packed one is unpacked when it is first read."""

    __slots__ = ("_columns",)

    def __init__(self, columns: dict[str, Any]) -> None:
        self._columns = columns

    def raw(self) -> Iterable[tuple[str, Any]]:
        """Returns the columns as they are, packed or not."""
        return self._columns.items()

    def __getitem__(self, name: str) -> V:
        column = self._columns[name]
        if isinstance(column, Packed):
            column = self._columns[name] = column.tensor()
        elif isinstance(column, Pickled):
            column = self._columns[name] = column.array()
        return column  # type: ignore[no-any-return]

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)
