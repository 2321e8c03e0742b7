"""Batch: the value that travels between stages. Its rows form whole groups (the n responses of one prompt).

Columns are tensors, or numpy object arrays of everything else (text, chat messages, explanations of scores); ``meta``
is a small dict for the whole batch (``weights_version``). Methods never change a batch but return a new one, so that
several tasks may read one value at once. A TensorDict is made only where verl needs one: its import takes as long as
torch's own, in each process (docs/decisions/0009).

Between processes tensors travel as numpy arrays, whose memory Ray shares; torch's own pickle copies it several times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.errors import DataflowError
from dataflow.usercode.copies import own_copy

if TYPE_CHECKING:
    from torch import Tensor
    from verl import DataProto


class Batch:
    """Columns over rows that form whole groups.

    Args:
        groups: group id of each row, int64 ``[rows]``; the rows of a group are adjacent.
        columns: tensors of shape ``[rows, ...]``, or lists/arrays of ``rows`` Python objects.
        meta: facts about the whole batch.

    Raises:
        DataflowError: a column has another number of rows, or the rows of a group are not adjacent.
    """

    __slots__ = ("arrays", "groups", "meta", "tensors")

    groups: np.ndarray
    tensors: Mapping[str, Tensor]
    arrays: dict[str, np.ndarray]
    meta: dict[str, Any]

    def __init__(
        self,
        groups: Sequence[int] | np.ndarray,
        columns: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        self.groups = np.asarray(groups, dtype=np.int64).reshape(-1)
        rows = len(self.groups)
        ids = self.ids
        if len(set(ids)) != len(ids):
            torn = next(g for g in ids if ids.count(g) > 1)
            raise DataflowError(f"Batch: the rows of group {torn} are not adjacent; sort rows by group.")
        self.tensors = tensors = {}
        self.arrays = {}
        for name, column in (columns or {}).items():
            if len(column) != rows:
                raise DataflowError(f"Batch: column '{name}' has {len(column)} rows, the batch has {rows}.")
            if _is_tensor(column):
                tensors[name] = column
            else:
                self.arrays[name] = _objects(column)
        self.meta = dict(meta or {})

    def __getstate__(self) -> tuple[Any, ...]:
        return self.groups, _Tensors.packed(self.tensors), self.arrays, self.meta

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.groups, packed, self.arrays, self.meta = state
        self.tensors = _Tensors(packed)

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
    def ids(self) -> tuple[int, ...]:
        """The group ids in order, each once."""
        if not len(self.groups):
            return ()
        starts = np.flatnonzero(np.diff(self.groups)) + 1
        return tuple(int(g) for g in self.groups[np.concatenate([[0], starts])])

    @property
    def sizes(self) -> dict[int, int]:
        """The number of rows of each group, by id."""
        ids = self.ids
        starts = np.flatnonzero(np.diff(self.groups)) + 1
        counts = np.diff([0, *starts, len(self)]).tolist() if ids else []
        return dict(zip(ids, counts, strict=True))

    @property
    def columns(self) -> dict[str, Any]:
        return {**self.tensors, **self.arrays}

    def select(self, groups: Sequence[int]) -> Batch:
        """Returns the rows of these groups, in the order given.

        Raises:
            DataflowError: a group is not in the batch, or given twice.
        """
        if tuple(groups) == self.ids:
            return self
        where: dict[int, list[int]] = {}
        for row, group in enumerate(self.groups.tolist()):
            where.setdefault(group, []).append(row)
        missing = [g for g in groups if g not in where]
        if missing:
            raise DataflowError(f"Batch: no group {missing[0]}; it holds {len(where)} groups.")
        if len(set(groups)) != len(groups):
            raise DataflowError("Batch: a group was selected twice; select each group once.")
        return self.rows([row for g in groups for row in where[g]])

    def rows(self, index: Sequence[int] | np.ndarray) -> Batch:
        """Returns these rows, in the order given."""
        at = np.asarray(index, dtype=np.int64)
        columns: dict[str, Any] = {}
        if self.tensors:
            import torch

            pick = torch.from_numpy(at)
            columns = {name: column[pick] for name, column in self.tensors.items()}
        columns |= {name: column[at] for name, column in self.arrays.items()}
        return Batch(self.groups[at], columns, self.meta)

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
        return Batch(rows.groups, {**rows.tensors, **own_copy(rows.arrays)}, rows.meta)

    def __deepcopy__(self, _memo: dict[int, Any]) -> Batch:
        columns = {**{name: column.clone() for name, column in self.tensors.items()}, **own_copy(self.arrays)}
        return Batch(self.groups.copy(), columns, own_copy(self.meta))

    def like(self, **columns: Any) -> Batch:
        """Returns a batch of the same groups with only these columns, as a stage that adds columns returns."""
        return Batch(self.groups, columns, self.meta)

    def merge(self, *others: Batch) -> Batch:
        """Returns one batch with the columns of all; of columns with the same name, the last wins.

        Raises:
            DataflowError: the batches do not have the same groups in the same order.
        """
        columns, meta = self.columns, dict(self.meta)
        for other in others:
            if not np.array_equal(self.groups, other.groups):
                raise DataflowError(f"Batch: cannot merge {other!r} into {self!r}: their groups differ.")
            columns |= other.columns
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
        columns: dict[str, Any] = {}
        if names:
            import torch

            columns = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
        for name in dict.fromkeys(name for part in parts for name in part.arrays):
            columns[name] = np.concatenate([part.arrays.get(name, _objects([None] * len(part))) for part in parts])
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
            non_tensors={**self.arrays, "uid": uid},
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
        """Bytes of the tensor columns."""
        return sum(column.numel() * column.element_size() for column in self.tensors.values())


class _Tensors(Mapping[str, "Tensor"]):
    """The tensors of a batch from another process.

    Arrays in Ray's shared memory are read-only, and a write to a tensor over such an array kills the process. So each
    tensor is a copy, made when its column is first read, as few stages read all columns.
    """

    __slots__ = ("_columns",)

    def __init__(self, packed: Mapping[str, Tensor | np.ndarray]) -> None:
        self._columns = dict(packed)

    @staticmethod
    def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor | np.ndarray]:
        """Returns the tensors as numpy arrays for pickling; a tensor that numpy cannot represent stays as it is."""
        columns = tensors._columns if isinstance(tensors, _Tensors) else tensors
        return {name: _packed(column) for name, column in columns.items()}

    def __getitem__(self, name: str) -> Tensor:
        column = self._columns[name]
        if isinstance(column, np.ndarray):
            import torch

            column = torch.from_numpy(column if column.flags.writeable else column.copy())
            self._columns[name] = column
        return column

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)


def _is_tensor(column: Any) -> bool:
    """True for a tensor. Does not import torch, which takes seconds: where it is not imported, there is no tensor."""
    return isinstance(column, getattr(sys.modules.get("torch"), "Tensor", ()))


def _packed(column: Tensor | np.ndarray) -> Tensor | np.ndarray:
    if isinstance(column, np.ndarray) or column.requires_grad:
        return column
    try:
        array: np.ndarray = column.contiguous().numpy()
    except (TypeError, RuntimeError):  # bfloat16, a sparse tensor, one on a GPU
        return column
    return array


def _objects(column: Any) -> np.ndarray:
    """Returns a 1-D object array; numpy alone would turn a list of lists of equal length into a matrix."""
    if isinstance(column, np.ndarray) and column.ndim == 1:
        return column
    array = np.empty(len(column), dtype=object)
    for i, item in enumerate(column):
        array[i] = item
    return array
