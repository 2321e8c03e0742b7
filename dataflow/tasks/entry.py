"""A task as the scheduler keeps it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dataflow.graph import Task, TaskId


@dataclass(slots=True)
class Entry:
    """A task of an unfinished step.

    Attributes:
        waiting: number of dependencies that are left.
        state: ``waiting``, ``ready``, ``running``, ``done`` or ``failed``.
        last_dep: task that ended last of those that it waited for.
        history: of the state, in words.
    """

    task: Task
    waiting: int = 0
    state: str = "waiting"
    last_dep: TaskId | None = None
    history: list[str] = field(default_factory=lambda: ["waiting"])

    @property
    def begun(self) -> bool:
        return self.state not in ("waiting", "ready")
