"""The groups that a task works on. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from dataflow.errors import DataflowError
from dataflow.graph import Task, TaskId


def groups_of(task: Task, known: Mapping[TaskId, tuple[int, ...] | None]) -> tuple[int, ...] | None:
    """Returns the groups that a task works on; None for all of the step.

    Args:
        task: the task.
        known: the groups that tasks collected or emitted.

    Raises:
        DataflowError: they cannot be divided as the task needs it.
    """
    chosen = [groups for i in task.chosen_by if (groups := known[i]) is not None]
    if not chosen:
        return None
    if len(chosen) > 1:
        return tuple(sorted(group for groups in chosen for group in groups))
    groups, (i, n) = chosen[0], task.mini_batch
    if len(groups) % n:
        raise DataflowError(f"scheduler: {task} cannot take 1/{n} of {len(groups)} groups.")
    size = len(groups) // n
    return groups[i * size : (i + 1) * size]
