"""Batch: the value that travels between stages. Its rows form whole groups (the n responses of one prompt).

Columns are tensors, or numpy object arrays of everything else (text, chat messages, explanations of scores); ``meta``
is a small dict for the whole batch (``weights_version``). Methods never change a batch but return a new one, so that
several tasks may read one value at once. A TensorDict is made only where verl needs one: its import takes as long as
torch's own, in each process (docs/decisions/0009).

Between processes columns travel packed (:mod:`dataflow.columns`): without padding, in numpy arrays, whose memory Ray
shares. Each is unpacked when it is first read, and then only the rows that were chosen before.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.columns.lazy import LazyColumns
from dataflow.columns.packed import Packed, packed
from dataflow.columns.pickled import Pickled, objects
from dataflow.columns.ragged import Dense
from dataflow.errors import DataflowError
from dataflow.usercode.copies import own_copy

if TYPE_CHECKING:
    from torch import Tensor
    from verl import DataProto


class Batch:
    """Columns over rows that form whole groups.

    Args:
        groups: group id of each row, int64 ``[rows]``; the rows of a group are adjacent.
        columns: tensors of shape ``[rows, ...]`` (or packed ones), or lists/arrays of ``rows`` Python objects.
        meta: facts about the whole batch.

    Raises:
        DataflowError: a column has another number of rows, the rows of a group are not adjacent, or an id is no whole
            number.
    """

    __slots__ = ("_groups", "_ids", "arrays", "meta", "tensors")

    tensors: LazyColumns[Tensor]
    arrays: LazyColumns[np.ndarray]
    meta: dict[str, Any]

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
        rows, ids = len(self.groups), self.ids
        if len(set(ids)) != len(ids):
            torn = next(g for g in ids if ids.count(g) > 1)
            raise DataflowError(f"Batch: the rows of group {torn} are not adjacent; sort rows by group.")
        tensors: dict[str, Any] = {}
        arrays: dict[str, Any] = {}
        for name, column in (columns or {}).items():
            if len(column) != rows:
                raise DataflowError(f"Batch: column '{name}' has {len(column)} rows, the batch has {rows}.")
            if isinstance(column, Packed) or _is_tensor(column):
                tensors[name] = column
            else:
                arrays[name] = column if isinstance(column, Pickled) else _objects(column)
        self.tensors, self.arrays = LazyColumns(tensors), LazyColumns(arrays)
        self.meta = dict(meta or {})

    def __getstate__(self) -> tuple[Any, ...]:
        raw = dict(self.tensors.raw())
        # By its id, as two names may have one tensor, which is packed and sent once.
        each = {id(column): column for column in raw.values()}
        sent = {at: column if isinstance(column, Packed) else packed(column) for at, column in each.items()}
        tensors = {name: sent[id(column)] for name, column in raw.items()}
        arrays = {
            name: column if isinstance(column, Pickled) else objects(column) for name, column in self.arrays.raw()
        }
        return self.groups, tensors, arrays, self.meta

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.groups, tensors, arrays, self.meta = state
        self.tensors = LazyColumns(tensors)
        self.arrays = LazyColumns(arrays)

    def __copy__(self) -> Batch:
        return Batch(self.groups, self.unread, self.meta)

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
    def groups(self) -> np.ndarray:
        """The group id of each row, int64 ``[rows]``."""
        return self._groups

    @groups.setter
    def groups(self, groups: np.ndarray) -> None:
        self._groups = groups
        self._ids: tuple[int, ...] | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The group ids in order, each once."""
        if self._ids is None:
            self._ids = tuple(self.groups[self._starts[:-1]].tolist())
        return self._ids

    @property
    def sizes(self) -> dict[int, int]:
        """The number of rows of each group, by id."""
        return dict(zip(self.ids, np.diff(self._starts).tolist(), strict=True))

    @property
    def _starts(self) -> np.ndarray:
        """The first row of each group, and the number of rows."""
        if not len(self.groups):
            return np.zeros(1, dtype=np.int64)
        return np.concatenate([[0], np.flatnonzero(np.diff(self.groups)) + 1, [len(self.groups)]])

    @property
    def columns(self) -> dict[str, Any]:
        """All columns by name, which reads them; :attr:`unread` does not."""
        return {**self.tensors, **self.arrays}

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor column, which it does not read."""
        return tuple(self._tensor(name).shape)

    def nonzero(self, name: str, last: int | None = None) -> np.ndarray:
        """Returns the number of values other than 0 in each row of a matrix, int64 ``[rows]``; does not read it.

        Args:
            name: of a tensor column ``[rows, width]``, such as a mask.
            last: counts among as many values at the end of each row; None for all.
        """
        matrix, width = self._matrix(name), self.shape(name)[1]
        return matrix.nonzero(width if last is None else min(last, width))

    def last(self, name: str) -> np.ndarray:
        """Returns the column of the last value of each row of a matrix that is not 0, int64 ``[rows]``; 0 if all are.

        Does not read the matrix.
        """
        return self._matrix(name).last()

    def masked(self, values: Tensor, name: str) -> Tensor | Packed:
        """Returns a matrix that is 0 where a mask is 0; packed, without a search for its padding, if the mask is.

        Args:
            values: of the same shape as the mask.
            name: of the mask, ``[rows, width]``.
        """
        column = self._tensor(name)
        there = isinstance(column, Packed) and not values.requires_grad
        found = column.masked(values) if there else None
        return values.masked_fill(self.tensors[name] == 0, 0.0) if found is None else found

    def _matrix(self, name: str) -> Packed | Dense:
        """Returns a matrix that is 0 where a tensor column is 0, and not elsewhere; packed if it was not read yet."""
        column = self._tensor(name)
        if len(column.shape) != 2:
            raise DataflowError(f"Batch: column '{name}' has the shape {tuple(column.shape)}, not [rows, width].")
        return column if isinstance(column, Packed) else Dense((column != 0).cpu().numpy())

    def _tensor(self, name: str) -> Any:
        """Returns a tensor column, packed if it was not read yet."""
        if name not in self.tensors:
            raise DataflowError(f"Batch: no tensor '{name}'; it has {', '.join(self.tensors) or 'none'}.")
        return self.unread[name]

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
        starts, at = self._starts, np.array([where[g] for g in groups], dtype=np.int64)
        wanted = np.diff(starts)[at]
        # The rows of each group follow one another, from its first one on.
        shift = starts[at] - (np.cumsum(wanted) - wanted)
        return self.rows(np.arange(int(wanted.sum())) + np.repeat(shift, wanted))

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

    def within(self, name: str, mask: str) -> Tensor:
        """Returns the values of a matrix where another one, of the same shape, is not 0, row after row.

        Reads neither if they came without the padding that the mask leaves out.
        """
        import torch

        column, by = self._tensor(name), self._tensor(mask)
        if isinstance(column, Packed) and isinstance(by, Packed) and (flat := column.within(by)) is not None:
            return torch.from_numpy(flat)
        return self.tensors[name][self.tensors[mask] != 0]

    def _picked(self, at: np.ndarray) -> dict[str, Any]:
        """Returns the columns of rows, packed if they were not read yet."""
        columns: dict[str, Any] = {}
        for name, column in self.unread.items():
            if isinstance(column, Packed | Pickled):
                columns[name] = column.rows(at)
            elif isinstance(column, np.ndarray):
                columns[name] = column[at]
            else:
                import torch

                try:  # numpy's copy starts no threads, whose waiting takes more CPU time than the copy
                    columns[name] = torch.from_numpy(column.numpy()[at])
                except (TypeError, RuntimeError):  # numpy has no such type, or it has a gradient
                    columns[name] = column[torch.from_numpy(at)]
        return columns

    @property
    def unread(self) -> dict[str, Any]:
        """All columns by name, for another batch of these rows: those not read yet are packed, and stay so."""
        return {**dict(self.tensors.raw()), **dict(self.arrays.raw())}

    def only(self, *names: str, **renamed: str) -> Batch:
        """Returns a batch with these columns alone, none of which it reads.

        Args:
            names: columns that keep their names.
            renamed: the column of this batch for each new name.

        Raises:
            DataflowError: there is no such column.
        """
        raw, wanted = self.unread, {**dict(zip(names, names, strict=True)), **renamed}
        return Batch(
            self.groups, {to: raw[name] if name in raw else self[name] for to, name in wanted.items()}, self.meta
        )

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
        at = np.repeat(np.arange(len(self)), n)
        rows = self.rows(at)
        arrays = {
            name: column.rows(at, own=True) if isinstance(column, Pickled) else own_copy(column[at])
            for name, column in self.arrays.raw()
        }
        return Batch(rows.groups, {**dict(rows.tensors.raw()), **arrays}, rows.meta)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Batch:
        tensors = {
            name: column.trimmed() if isinstance(column, Packed) else column.clone()
            for name, column in self.tensors.raw()
        }
        return Batch(self.groups.copy(), {**tensors, **own_copy(dict(self.arrays))}, own_copy(self.meta))

    def like(self, **columns: Any) -> Batch:
        """Returns a batch of the same groups with only these columns, as a stage that adds columns returns."""
        return Batch(self.groups, columns, self.meta)

    def merge(self, *others: Batch) -> Batch:
        """Returns one batch with the columns of all; of columns with the same name, the last wins.

        Raises:
            DataflowError: the batches do not have the same groups in the same order.
        """
        columns, meta = self.unread, dict(self.meta)
        for other in others:
            if not np.array_equal(self.groups, other.groups):
                raise DataflowError(f"Batch: cannot merge {other!r} into {self!r}: their groups differ.")
            columns = {**columns, **other.unread}
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
        names = set(parts[0].tensors)
        for part in parts[1:]:
            if set(part.tensors) != names:
                raise DataflowError(
                    f"Batch: cannot concatenate columns {sorted(parts[0].names)} with {sorted(part.names)}."
                )
        ids = [group for part in parts for group in part.ids]
        if len(set(ids)) != len(ids):
            raise DataflowError("Batch: cannot concatenate batches that have the same group.")
        if len(parts) == 1:
            return parts[0].rows(np.arange(len(parts[0])))  # a change to the result is none to the part
        columns: dict[str, Any] = {name: _joined([part.tensors for part in parts], name) for name in parts[0].tensors}
        for name in dict.fromkeys(name for part in parts for name in part.arrays):
            columns[name] = _gathered(parts, name)
        meta: dict[str, Any] = {}
        for part in parts:
            meta |= part.meta
        return Batch(np.concatenate([part.groups for part in parts]), columns, meta)

    def to_dataproto(self) -> DataProto:
        """Returns a DataProto of verl with the same columns, and the group ids as text in ``uid``."""
        from verl import DataProto

        uid = np.array([str(g) for g in self.groups], dtype=object)
        return DataProto.from_dict(
            tensors=dict(self.tensors),
            non_tensors={**dict(self.arrays), "uid": uid},
            meta_info=dict(self.meta),
        )

    @staticmethod
    def from_dataproto(data: DataProto) -> Batch:
        """Returns a batch from a DataProto whose ``uid`` column holds the group ids."""
        columns = {**dict(data.batch.items()), **data.non_tensor_batch}
        groups = [int(g) for g in columns.pop("uid")]
        return Batch(groups, columns, data.meta_info)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor columns, unpacked."""
        return sum(
            column.nbytes if isinstance(column, Packed) else column.numel() * column.element_size()
            for _name, column in self.tensors.raw()
        )


def _is_tensor(column: Any) -> bool:
    """True for a tensor. Does not import torch, which takes seconds: where it is not imported, there is no tensor."""
    return isinstance(column, getattr(sys.modules.get("torch"), "Tensor", ()))


def _joined(parts: Sequence[LazyColumns[Tensor]], name: str) -> Any:
    """Returns the rows of a tensor column, packed if those of all parts are."""
    raw = [dict(part.raw())[name] for part in parts]
    if all(isinstance(column, Packed) for column in raw) and (whole := Packed.concat(raw)) is not None:
        return whole
    import torch

    return torch.cat([part[name] for part in parts])


def _gathered(parts: Sequence[Batch], name: str) -> Any:
    """Returns the rows of an object column of all parts, packed if all are; None where a part lacks it."""
    raw: list[Any] = [dict(part.arrays.raw()).get(name) for part in parts]
    if all(isinstance(column, Pickled) for column in raw):
        return Pickled.concat(raw)
    found = [part.arrays.get(name, _objects([None] * len(part))) for part in parts]
    if len({column.dtype for column in found}) > 1:
        found = [column.astype(object) for column in found]  # numpy would turn numbers into texts, or round them
    return np.concatenate(found)


def _objects(column: Any) -> np.ndarray:
    """Returns a 1-D object array; numpy alone would turn a list of lists of equal length into a matrix."""
    if isinstance(column, np.ndarray) and column.ndim == 1:
        return column
    array = np.empty(len(column), dtype=object)
    for i, item in enumerate(column):
        array[i] = item
    return array
