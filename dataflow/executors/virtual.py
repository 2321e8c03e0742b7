"""The virtual executor: a heap of ends on a clock that jumps, under the same runner and scheduler."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.errors import DataflowError
from dataflow.executors.base import ALONE, Chunk, Done, Report, StageCall
from dataflow.graph import Hosted, Pipeline, Task, TaskId


@dataclass(frozen=True)
class End:
    """The end of a task, in seconds of the virtual clock.

    Attributes:
        begin: when its work begins, if later than its start; the time between is the way to its worker.
        groups: ids that it chose, if its stage collects.
        chunks: (time, group ids) of each chunk that it emits, in order of time.
    """

    at: float
    begin: float | None = None
    groups: tuple[int, ...] | None = None
    chunks: tuple[tuple[float, tuple[int, ...] | None], ...] = ()


def groups_by_index(task: Task, groups: int) -> tuple[int, ...]:
    """Returns the groups of a collecting task's part, of a step whose ``groups`` groups are taken in order of id."""
    each = task.take or groups
    return tuple(range(task.id.part * each, (task.id.part + 1) * each))


def chunks_of(
    task: Task, groups: int, begin: float, end: float, ends: Sequence[float] = ()
) -> tuple[tuple[float, tuple[int, ...] | None], ...]:
    """Returns (time, group ids) of each chunk that a task emits between ``begin`` and ``end``; none unless it streams.

    ``groups`` is the number of groups in a step. ``ends`` are the fractions of that time after which each group is
    complete, in order; they are spread evenly if it is empty.
    """
    n = task.emits
    if n == 1:
        return ()
    each = groups // n
    shares = [ends[-(-(k + 1) * len(ends) // n) - 1] if ends else (k + 1) / n for k in range(n)]
    return tuple(
        (min(end, begin + (end - begin) * share), tuple(range(k * each, (k + 1) * each)))
        for k, share in enumerate(shares)
    )


class Costs(ABC):
    """Durations of tasks. A subclass gives each end in :meth:`start`, or later in :meth:`advance`."""

    @abstractmethod
    def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End | None:
        """Returns the end of a task that starts at ``now``; None if it is not known yet.

        ``groups`` are ids that it works on; None for all groups of the step.
        """

    def advance(self, until: float) -> tuple[TaskId, End] | None:
        """Returns the next end of a task whose end was not known, if it is at or before ``until``."""
        return None


class VirtualExecutor:
    """Runs a task graph on a virtual clock that starts at 0. Ties go to the event that was added first."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._now = 0.0
        self._sequence = 0
        self._heap: list[tuple[float, int, Done | Chunk]] = []
        self._open: dict[TaskId, tuple[Task, float]] = {}
        self._cancelled: set[TaskId] = set()

    async def open(self, pipeline: Pipeline, hosts: Mapping[str, Hosted] = ALONE) -> None:
        """Does nothing: there is nothing to build."""

    def now(self) -> float:
        return self._now

    def put(self, value: Any) -> Any:
        return None

    def start(self, task: Task, call: StageCall, values: Sequence[Any]) -> None:
        self._open[task.id] = (task, self._now)
        end = self.costs.start(task, call.groups, self._now)
        if end is not None:
            self._ends(task.id, end)

    def _ends(self, i: TaskId, end: End) -> None:
        task, start = self._open.pop(i)
        begin = start if end.begin is None else end.begin
        if not start <= begin <= end.at:
            raise DataflowError(
                f"virtual clock: {task} started at {start}, but its costs say that it begins at {begin} and ends at "
                f"{end.at}."
            )
        blank = (None,) * len(task.stage.writes)
        for number, (at, groups) in enumerate(end.chunks):
            self._push(at, Chunk(i._replace(part=number, parts=len(end.chunks)), at, groups, blank))
        self._push(end.at, Done(i, Report(begin, end.at, end.groups), blank))

    def _push(self, at: float, event: Done | Chunk) -> None:
        heapq.heappush(self._heap, (at, self._sequence, event))
        self._sequence += 1

    async def events(self) -> AsyncIterator[Done | Chunk]:
        while True:
            until = self._heap[0][0] if self._heap else math.inf
            if self._open and (found := self.costs.advance(until)):
                self._ends(*found)
            if not self._heap:
                return
            end, _sequence, event = heapq.heappop(self._heap)
            if event.id in self._cancelled:
                continue
            self._now = end
            yield event

    def cancel(self, task: TaskId) -> None:
        self._cancelled.add(task)

    async def ask(self, host: str, method: str, *arguments: Any) -> Any:
        raise DataflowError(f"virtual executor: there are no services, so '{host}.{method}' cannot be called.")

    async def close(self) -> None:
        self._heap.clear()
        self._open.clear()
