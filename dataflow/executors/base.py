"""The executor protocol: what the runner sends to an executor, and what comes back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from dataflow.graph import Hosted, Pipeline, Task, TaskId, TaskInfo

ALONE: Mapping[str, Hosted] = MappingProxyType({})
"""No services beside those of the pipeline."""


@dataclass
class Report:
    """The result of a task beside its values, small enough for the controller to read.

    Attributes:
        begin, end: of the call, in seconds of the executor's clock (``now``).
        groups: ids that the task chose, if its stage collects.
        marks: spans and levels inside the task, for the trace.
        facts: arguments of the task's span in the trace.
        written: group ids of each field that holds a Batch.
        held: the groups that it leaves in the memory of its service, if its stage replays.
        logged: level and text of the warnings and errors that the process logged since its last report, if it has no
            terminal of its own.
    """

    begin: float
    end: float
    groups: tuple[int, ...] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    written: dict[str, tuple[int, ...]] = field(default_factory=dict)
    held: tuple[int, ...] | None = None
    logged: tuple[tuple[str, str], ...] = ()


@dataclass
class Done:
    """A task ended: its report and a handle per field it writes, or the error that ended it."""

    id: TaskId
    report: Report | None = None
    values: tuple[Any, ...] = ()
    error: BaseException | None = None


@dataclass
class Chunk:
    """Groups that a streaming task emitted before its end, ``at`` seconds of the executor's clock.

    ``id`` is the task's step and stage, with the chunk's number and the number of chunks; ``values`` has a handle per
    field that the stage writes.
    """

    id: TaskId
    at: float
    groups: tuple[int, ...] | None = None
    values: tuple[Any, ...] = ()


@dataclass(frozen=True)
class StageCall:
    """One call of a stage function, as it travels to the process that runs it, which has the function.

    Attributes:
        layout: for each field its name, the number of values that make it up, and whether to pass it as it is (a
            state).
        groups: ids to select from the values; None for all.
        emitted: numbers of the chunks that the task has emitted already; their values follow those of the fields, in
            this order.
        aligned, keeps: see :class:`~dataflow.graph.Task`.
    """

    stage: str
    info: TaskInfo
    layout: tuple[tuple[str, int, bool], ...]
    groups: tuple[int, ...] | None
    emitted: tuple[int, ...] = ()
    aligned: tuple[str, ...] = ()
    keeps: bool = False


class Executor(Protocol):
    """Runs tasks. ``start`` returns at once; ends of tasks and chunks are yielded by ``events``."""

    async def open(self, pipeline: Pipeline, hosts: Mapping[str, Hosted] = ALONE) -> None:
        """Builds the services of the pipeline, and others that no stage uses; may be called again with further stages.

        ``hosts`` are those others, by name: :meth:`ask` calls their methods.
        """
        ...

    def now(self) -> float:
        """Returns seconds on this executor's clock."""
        ...

    def put(self, value: Any) -> Any:
        """Returns a handle for a value of the controller."""
        ...

    def start(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        """Starts a task; ``values`` are the handles of its fields in the order of ``call.layout``."""
        ...

    def events(self) -> AsyncIterator[Done | Chunk]:
        """Yields ends of tasks and chunks as they happen, without polling."""
        ...

    def cancel(self, task: TaskId) -> None:
        """Stops a running task if possible; its event may still come."""
        ...

    async def ask(self, host: str, method: str, *arguments: Any) -> Any:
        """Calls a method of a service on all its ranks and returns the first rank's answer.

        Raises NotOffered if the service has no such method.
        """
        ...

    async def close(self) -> None:
        """Ends the services and what ``open`` started for them."""
        ...
