"""Refuses numbers from which no finite advantage follows, before one that is NaN makes the whole update NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.graph import TaskInfo

if TYPE_CHECKING:
    import torch


def check_finite(
    values: torch.Tensor,
    what: str,
    samples: Batch,
    task: TaskInfo,
    *,
    counts: torch.Tensor | None = None,
    most: float = 3e38,
) -> None:
    """Checks the numbers of samples.

    Args:
        values: ``[rows]`` or ``[rows, R]``.
        what: they are, for the message.
        samples: of these rows.
        task: that checks them.
        counts: which of the numbers count, of the same shape; None for all.
        most: the largest one.

    Raises:
        DataError: one is NaN, infinite or larger; with its sample.
    """
    bad = ~(values.abs() <= most)
    bad = bad if counts is None else bad & (counts != 0)
    if not bad.any():
        return
    row = int(bad.reshape(len(bad), -1).any(dim=1).nonzero()[0])
    group = int(samples.groups[row])
    first = samples.groups.tolist().index(group)
    value, why = float(values[row][bad[row]].reshape(-1)[0]), "it must be a finite number"
    if abs(value) > most:
        why += f" of at most {most:g}, as float32 cannot hold the advantages of a larger one"
    raise DataError(f"{task.stage}[{task.step}]: {what} of sample {row - first} of group {group} is {value:g}; {why}.")
