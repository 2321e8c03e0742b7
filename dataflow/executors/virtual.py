"""The virtual executor: no work, no waiting, a heap of ends on a clock that jumps. Same runner, same scheduler."""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.errors import DataflowError
from dataflow.executors.base import Call, Done, Part, Report
from dataflow.graph import Pipeline, Task, TaskId


@dataclass(frozen=True)
class End:
    """When a task ends, in seconds of the virtual clock.

    Attributes:
        at: its end.
        begin: when its work began, if later than its start: what came before was on the way to its worker.
        groups: that it chose, if it forms parts.
        parts: (time, groups) of each set of groups that it hands on while it runs, in order of time.
    """

    at: float
    begin: float | None = None
    groups: tuple[int, ...] | None = None
    parts: tuple[tuple[float, tuple[int, ...] | None], ...] = ()


def parts_of(
    task: Task, groups: int, begin: float, end: float, ends: Sequence[float] = ()
) -> tuple[tuple[float, tuple[int, ...] | None], ...]:
    """Returns what a streaming task hands on from ``begin`` to ``end``; nothing if it does not.

    Args:
        task: which.
        groups: of a step.
        begin: of its work, in seconds.
        end: of it.
        ends: the share of that time after which each group has ended, in order; evenly if none is given.
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
    """How long tasks take. A subclass says it in :meth:`start`, or later, in :meth:`advance`."""

    @abstractmethod
    def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End | None:
        """Returns when a task that starts at ``now`` ends; None if that is not known yet.

        Args:
            task: that starts.
            groups: it works on; None for all of the step.
            now: seconds.
        """

    def advance(self, until: float) -> tuple[TaskId, End] | None:
        """Returns the next of the tasks whose end was not known, if it ends by ``until``."""
        return None


class VirtualExecutor:
    """Runs a task graph on a virtual clock that starts at 0. Ties go to what was started first."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._now = 0.0
        self._sequence = 0
        self._heap: list[tuple[float, int, Done | Part]] = []
        self._open: dict[TaskId, tuple[Task, float]] = {}
        self._cancelled: set[TaskId] = set()

    async def open(self, pipeline: Pipeline) -> None:
        """Nothing to build."""

    def now(self) -> float:
        return self._now

    def put(self, value: Any) -> Any:
        return None

    def start(self, task: Task, call: Call, values: Sequence[Any]) -> None:
        self._open[task.id] = (task, self._now)
        end = self.costs.start(task, call.groups, self._now)
        if end is not None:
            self._ends(task.id, end)

    def _ends(self, i: TaskId, end: End) -> None:
        task, start = self._open.pop(i)
        begin = start if end.begin is None else end.begin
        if not start <= begin <= end.at:
            raise DataflowError(f"virtual clock: {task} started at {start}, would begin at {begin}, end at {end.at}.")
        blank = (None,) * len(task.stage.writes)
        for number, (at, groups) in enumerate(end.parts):
            self._push(at, Part(i._replace(part=number, parts=len(end.parts)), at, groups, blank))
        self._push(end.at, Done(i, Report(begin, end.at, end.groups), blank))

    def _push(self, at: float, event: Done | Part) -> None:
        heapq.heappush(self._heap, (at, self._sequence, event))
        self._sequence += 1

    async def events(self) -> AsyncIterator[Done | Part]:
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

    async def ask(self, host: str, method: str) -> Any:
        raise DataflowError(f"virtual executor: nobody is there to ask '{host}.{method}'.")

    async def close(self) -> None:
        self._heap.clear()
        self._open.clear()
