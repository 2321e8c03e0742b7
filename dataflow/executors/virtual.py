"""The virtual executor: no work, no waiting, a heap of ends on a clock that jumps. Same runner, same scheduler."""

from __future__ import annotations

import heapq
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from dataflow.errors import DataflowError
from dataflow.executors.base import Call, Done, Report
from dataflow.graph import Pipeline, Task, TaskId


class Costs(Protocol):
    """How long tasks take."""

    def end(self, task: Task, now: float) -> tuple[float, tuple[int, ...] | None]:
        """Returns when a task that starts at ``now`` ends, and the groups it chose if it forms parts."""
        ...


class VirtualExecutor:
    """Runs a task graph on a virtual clock that starts at 0. Ties go to what was started first."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._now = 0.0
        self._sequence = 0
        self._heap: list[tuple[float, int, Done]] = []
        self._cancelled: set[TaskId] = set()

    async def open(self, pipeline: Pipeline) -> None:
        """Nothing to build."""

    def now(self) -> float:
        return self._now

    def put(self, value: Any) -> Any:
        return None

    def start(self, task: Task, call: Call, values: Sequence[Any]) -> None:
        end, groups = self.costs.end(task, self._now)
        if not end >= self._now:
            raise DataflowError(f"virtual clock: {task} would end at {end}, before it starts at {self._now}.")
        done = Done(task.id, Report(self._now, end, groups), (None,) * len(task.stage.writes))
        heapq.heappush(self._heap, (end, self._sequence, done))
        self._sequence += 1

    async def events(self) -> AsyncIterator[Done]:
        while self._heap:
            end, _sequence, done = heapq.heappop(self._heap)
            if done.id in self._cancelled:
                continue
            self._now = end
            yield done

    def cancel(self, task: TaskId) -> None:
        self._cancelled.add(task)

    async def ask(self, host: str, method: str) -> Any:
        raise DataflowError(f"virtual executor: nobody is there to ask '{host}.{method}'.")

    async def close(self) -> None:
        self._heap.clear()
