"""Batch: the value that travels between stages. Its rows form whole groups (the n responses of one prompt).

Columns are tensors, or numpy object arrays of everything else (text, chat messages, explanations of scores); ``meta``
is a small dict for the whole batch (``weights_version``). Methods never change a batch but return a new one, so that
several tasks may read one value at once. Columns that no stage has read stay in the form of :mod:`dataflow.columns`: a
stage pays for the columns and rows that it reads. A TensorDict is made only where verl needs one: its import takes as
long as torch's own, in each process (docs/decisions/0009).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.columns import Column, Columns, Dense, Ragged, column_of, is_tensor, objects
from dataflow.errors import DataflowError
from dataflow.usercode.copies import own_copy

if TYPE_CHECKING:
    from torch import Tensor
    from verl import DataProto


class Batch:
    """Columns over rows that form whole groups.

    Args:
        groups: group id of each row, int64 ``[rows]``; the rows of a group are adjacent.
        columns: tensors of shape ``[rows, ...]``, lists/arrays of ``rows`` Python objects, or :mod:`dataflow.columns`.
        meta: facts about the whole batch.

    Attributes:
        tensors, arrays: the columns of either kind by name.

    Raises:
        DataflowError: a column has another number of rows, the rows of a group are not adjacent, or an id is no whole
            number.
    """

    tensors: Columns[Tensor]
    arrays: Columns[np.ndarray]

    def __init__(
        self,
        groups: Sequence[int] | np.ndarray,
        columns: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        given = np.asarray(groups).reshape(-1)
        if given.size and given.dtype.kind not in "iuO":
            raise DataflowError(f"Batch: group ids are whole numbers, not {given[0]!r}.")
        self.groups = given.astype(np.int64)  # a copy: the caller may change its array
        """The group id of each row, int64 ``[rows]``."""
        rows = len(self.groups)
        bounds = np.flatnonzero(np.diff(self.groups)) + 1
        self._starts = np.array([0, *bounds, rows]) if rows else np.zeros(1, dtype=np.int64)
        self.ids: tuple[int, ...] = tuple(self.groups[self._starts[:-1]].tolist())
        """The group ids in order, each once."""
        if len(set(self.ids)) != len(self.ids):
            torn = next(g for g in self.ids if self.ids.count(g) > 1)
            raise DataflowError(f"Batch: the rows of group {torn} are not adjacent; sort rows by group.")
        tensors: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        for name, column in (columns or {}).items():
            if len(column) != rows:
                raise DataflowError(f"Batch: column '{name}' has {len(column)} rows, the batch has {rows}.")
            if isinstance(column, Dense | Ragged) or is_tensor(column):
                tensors[name] = column
            else:
                arrays[name] = column if isinstance(column, Column) else objects(column)
        self.tensors, self.arrays = Columns(tensors), Columns(arrays)
        self.meta: dict[str, Any] = dict(meta or {})

    def __reduce__(self) -> tuple[Any, ...]:
        raw = self._raw()
        # By its id, as two names may have one tensor, which then travels once.
        made = {key: column_of(column) for key, column in {id(column): column for column in raw.values()}.items()}
        return Batch, (self.groups, {name: made[id(column)] for name, column in raw.items()}, self.meta)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Batch:
        # own_copy, and not deepcopy, in whose copy equal rows would still share an object
        tensors = {name: c.clone() if is_tensor(c) else c for name, c in self.tensors.raw.items()}
        arrays = {name: c if isinstance(c, Column) else own_copy(c) for name, c in self.arrays.raw.items()}
        return Batch(self.groups, {**tensors, **arrays}, own_copy(self.meta))

    def __len__(self) -> int:
        return len(self.groups)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __getitem__(self, name: str) -> Any:
        """Returns the column of that name: a tensor or a numpy object array."""
        if name in self.arrays:
            return self.arrays[name]
        if name in self.tensors:
            return self.tensors[name]
        raise DataflowError(f"Batch: no column '{name}'; it has {', '.join(self.names) or 'none'}.")

    def __repr__(self) -> str:
        return f"Batch({len(self.ids)} groups, {len(self)} rows: {', '.join(self.names)})"

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.tensors, *self.arrays)

    @property
    def sizes(self) -> dict[int, int]:
        """The number of rows of each group, by id."""
        return dict(zip(self.ids, np.diff(self._starts).tolist(), strict=True))

    @property
    def columns(self) -> dict[str, Any]:
        """All columns by name, which reads them."""
        return {**self.tensors, **self.arrays}

    def _raw(self) -> dict[str, Any]:
        """Returns all columns by name, without reading any."""
        return {**self.tensors.raw, **self.arrays.raw}

    # --- what a column holds, without reading it ------------------------------------------------------------

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor column."""
        if name not in self.tensors:
            raise DataflowError(f"Batch: no tensor '{name}'; it has {', '.join(self.tensors) or 'none'}.")
        return tuple(self.tensors.raw[name].shape)

    def nonzero(self, name: str, last: int | None = None) -> np.ndarray:
        """Returns the number of values other than 0 in each row of a mask, int64 ``[rows]``.

        Args:
            name: of a tensor column ``[rows, width]``, padded with 0.
            last: counts among as many values at the end of each row; None for all.
        """
        mask = self._mask(name)
        return mask.nonzero(mask.width if last is None else last)

    def last(self, name: str) -> np.ndarray:
        """Returns the column of the last value of each row of a mask that is not 0, int64 ``[rows]``; 0 if all are."""
        return self._mask(name).last()

    def _mask(self, name: str) -> Ragged:
        shape, column = self.shape(name), self.tensors.raw[name]
        if len(shape) != 2:
            raise DataflowError(f"Batch: column '{name}' has the shape {shape}, not [rows, width].")
        if isinstance(column, Ragged) and not column.pad:
            return column
        rows, width = shape
        values = (self.tensors[name] != 0).cpu().numpy().reshape(-1)
        lengths = np.full(rows, width, dtype=np.int64)
        return Ragged(values, np.arange(rows) * width, lengths, np.zeros_like(lengths), width, values.dtype)

    def within(self, name: str, mask: str) -> Tensor:
        """Returns the values of a matrix where another one, of the same shape, is not 0, row after row.

        Reads neither if both came without padding.
        """
        import torch

        column, by = self.tensors.raw[name], self.tensors.raw[mask]
        if isinstance(column, Ragged) and isinstance(by, Ragged) and (flat := column.within(by)) is not None:
            return torch.from_numpy(flat)
        return self.tensors[name][self.tensors[mask] != 0]

    # --- other rows ------------------------------------------------------------------------------------------

    def select(self, groups: Sequence[int]) -> Batch:
        """Returns the rows of these groups, in the order given.

        Raises:
            DataflowError: a group is not in the batch, or given twice.
        """
        if tuple(groups) == self.ids:
            return self
        where = dict(zip(self.ids, range(len(self.ids)), strict=True))
        missing = [g for g in groups if g not in where]
        if missing:
            raise DataflowError(f"Batch: no group {missing[0]}; it holds {len(where)} groups.")
        if len(set(groups)) != len(groups):
            raise DataflowError("Batch: a group was selected twice; select each group once.")
        at = np.array([where[g] for g in groups], dtype=np.int64)
        sizes = np.diff(self._starts)[at]
        # The rows of each group follow one another, from its first one on.
        shift = self._starts[at] - (np.cumsum(sizes) - sizes)
        return self.rows(np.arange(int(sizes.sum())) + np.repeat(shift, sizes))

    def rows(self, index: Sequence[int] | np.ndarray) -> Batch:
        """Returns these rows, in the order given.

        Args:
            index: numbers of rows, or for each row whether it is one of them.

        Raises:
            DataflowError: it is neither.
        """
        at = self._places(index)
        return Batch(self.groups[at], self._picked(at), self.meta)

    def singles(self, index: Sequence[int] | np.ndarray) -> Batch:
        """Returns these rows as groups of their own, numbered anew; a row may occur twice. See :meth:`rows`."""
        at = self._places(index)
        return Batch(np.arange(len(at)), self._picked(at), self.meta)

    def _places(self, index: Sequence[int] | np.ndarray) -> np.ndarray:
        at = np.asarray(index)
        if at.dtype == bool and at.shape == (len(self),):
            return np.flatnonzero(at)
        if at.ndim != 1 or (at.size and at.dtype.kind not in "iu"):
            raise DataflowError(
                f"Batch: rows are chosen by their numbers, or by a mask of {len(self)} bools; this has the shape "
                f"{at.shape} and the type {at.dtype}."
            )
        return at.astype(np.int64, copy=False)

    def _picked(self, at: np.ndarray) -> dict[str, Any]:
        """Returns the columns of rows, unread if they are."""
        return {
            name: column.rows(at) if isinstance(column, Column) else column[at] for name, column in self._raw().items()
        }

    def split(self, parts: int) -> list[Batch]:
        """Splits the batch, in order, into ``parts`` batches with the same number of whole groups.

        Raises:
            DataflowError: ``parts`` does not divide the number of groups.
        """
        ids = self.ids
        if parts < 1 or len(ids) % parts:
            raise DataflowError(f"Batch: {parts} parts do not divide {len(ids)} groups.")
        size = len(ids) // parts
        return [self.select(ids[i * size : (i + 1) * size]) for i in range(parts)]

    def repeat(self, n: int) -> Batch:
        """Returns each row n times, the copies adjacent: prompts become rows for n responses.

        Object columns are copied for each row, so that a change to one chat does not show in the others.
        """
        rows = self.rows(np.repeat(np.arange(len(self)), n))
        arrays = {name: c if isinstance(c, Column) else own_copy(c) for name, c in rows.arrays.raw.items()}
        return Batch(rows.groups, {**rows.tensors.raw, **arrays}, rows.meta)

    # --- other columns ---------------------------------------------------------------------------------------

    def only(self, *names: str, **renamed: str) -> Batch:
        """Returns a batch with these columns alone, none of which it reads.

        Args:
            names: columns that keep their names.
            renamed: the column of this batch for each new name.

        Raises:
            DataflowError: there is no such column.
        """
        raw, wanted = self._raw(), {**dict(zip(names, names, strict=True)), **renamed}
        return self.like(**{to: raw[name] if name in raw else self[name] for to, name in wanted.items()})

    def like(self, **columns: Any) -> Batch:
        """Returns a batch of the same groups with only these columns, as a stage that adds columns returns."""
        return Batch(self.groups, columns, self.meta)

    def merge(self, *others: Batch) -> Batch:
        """Returns one batch with the columns of all; of columns with the same name, the last wins.

        Raises:
            DataflowError: the batches do not have the same groups in the same order.
        """
        columns, meta = self._raw(), dict(self.meta)
        for other in others:
            if not np.array_equal(self.groups, other.groups):
                raise DataflowError(f"Batch: cannot merge {other!r} into {self!r}: their groups differ.")
            columns |= other._raw()
            meta |= other.meta
        return Batch(self.groups, columns, meta)

    @staticmethod
    def concat(batches: Iterable[Batch]) -> Batch:
        """Returns the rows of all batches, which must have the same tensors and distinct groups.

        An object column that a batch lacks is None there: the extra columns of a user's reward may differ from sample
        to sample.

        Raises:
            DataflowError: there is no batch, tensors differ, or two batches have the same group.
        """
        parts = list(batches)
        if not parts:
            raise DataflowError("Batch: nothing to concatenate.")
        first = parts[0]
        for part in parts[1:]:
            if set(part.tensors) != set(first.tensors):
                raise DataflowError(
                    f"Batch: cannot concatenate columns {sorted(first.names)} with {sorted(part.names)}."
                )
        ids = [group for part in parts for group in part.ids]
        if len(set(ids)) != len(ids):
            raise DataflowError("Batch: cannot concatenate batches that have the same group.")
        if len(parts) == 1:
            return first.rows(np.arange(len(first)))  # a change to the result is none to the part
        columns = {name: _joined(name, [part.tensors for part in parts]) for name in first.tensors}
        for name in dict.fromkeys(name for part in parts for name in part.arrays):
            columns[name] = _joined(name, [part.arrays for part in parts], [len(part) for part in parts])
        meta: dict[str, Any] = {}
        for part in parts:
            meta |= part.meta
        return Batch(np.concatenate([part.groups for part in parts]), columns, meta)

    # --- verl's form -----------------------------------------------------------------------------------------

    def to_dataproto(self) -> DataProto:
        """Returns a DataProto of verl with the same columns, and the group ids as text in ``uid``."""
        from verl import DataProto

        uid = np.array([str(g) for g in self.groups], dtype=object)
        return DataProto.from_dict(
            tensors=dict(self.tensors),
            non_tensors={**dict(self.arrays), "uid": uid},
            meta_info=dict(self.meta),
        )


def _joined(name: str, parts: Sequence[Columns[Any]], rows: Sequence[int] = ()) -> Any:
    """Returns the rows of a column of all parts, unread if all are; None in the rows of a part that lacks it."""
    raw: list[Any] = [part.raw.get(name) for part in parts]
    if all(isinstance(column, Column) for column in raw) and (whole := Column.concat(raw)) is not None:
        return whole
    if is_tensor(raw[0]) or isinstance(raw[0], Dense | Ragged):
        import torch

        return torch.cat([part[name] for part in parts])
    found = [part.get(name, objects([None] * n)) for part, n in zip(parts, rows, strict=True)]
    if len({column.dtype for column in found}) > 1:
        found = [column.astype(object) for column in found]  # numpy would turn numbers into texts, or round them
    return np.concatenate(found)
