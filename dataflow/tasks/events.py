"""What runner and scheduler exchange: events about tasks, and the instructions that follow from them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from dataflow.graph import Task, TaskId


@dataclass(frozen=True)
class TaskFinished:
    """A task finished after ``elapsed`` seconds; ``groups`` are the ids it chose, if its stage collects."""

    id: TaskId
    elapsed: float = 0.0
    groups: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TaskFailed:
    """A task raised or its process died."""

    id: TaskId
    why: str = ""


@dataclass(frozen=True)
class ChunkEmitted:
    """A running task emitted a chunk: ``id`` has its step and stage, the chunk's number and the number of chunks."""

    id: TaskId
    groups: tuple[int, ...] | None = None


Event: TypeAlias = TaskFinished | TaskFailed | ChunkEmitted


@dataclass(frozen=True)
class Start:
    """Start this task on these groups (None: all of the step). ``waited_for`` is the dependency that finished last."""

    task: Task
    groups: tuple[int, ...] | None = None
    waited_for: TaskId | None = None


@dataclass(frozen=True)
class Cancel:
    """Stop a running task; its result is not needed any more."""

    id: TaskId


@dataclass(frozen=True)
class StepDone:
    """All tasks of the step have finished, except those of optional stages (``every``)."""

    step: int


@dataclass(frozen=True)
class Release:
    """Every task of the step has finished; its values may be dropped."""

    step: int


@dataclass(frozen=True)
class RunDone:
    """The run is over; ``failed`` is the task that ended it, if any."""

    failed: TaskId | None = None


Instruction: TypeAlias = Start | Cancel | StepDone | Release | RunDone
