"""The order in which the ready tasks of one resource run (docs/decisions/0002-priority.md). Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from dataflow.graph import Pipeline, Stage, Task, TaskGraph

# Estimates for a stage that was not measured yet; a wait on a remote service (no slot limit) is assumed to be long.
GUESS_S = 1.0
GUESS_WAIT_S = 8.0
# Weight of the newest measurement in a stage's running mean.
NEWEST = 0.5


class Estimates:
    """The seconds that each stage takes in one step, all parts together: their number may change with the policy.

    Args:
        graph: the task graph.
        estimates: seconds per task of a stage, where known; the others are learned.
    """

    def __init__(self, graph: TaskGraph, estimates: Mapping[str, float]) -> None:
        self._graph = graph
        self._known = {name: each * graph.parts.get(name, 1) for name, each in estimates.items()}

    def learn(self, task: Task, elapsed: float) -> None:
        """Takes the seconds of a task into account."""
        known, seconds = self._known.get(task.stage.name), elapsed * task.id.parts
        self._known[task.stage.name] = seconds if known is None else known + NEWEST * (seconds - known)

    def priorities(self) -> dict[str, tuple[float, float]]:
        """Returns the priority of each stage, lowest first: work before the next remote wait, then the longest path."""
        pipeline = self._graph.pipeline
        seconds = {s.name: self._seconds(s) for s in pipeline.stages}
        upward: dict[str, float] = {}
        for s in reversed(pipeline.order):
            behind = [upward[t.name] for _s, t, _field, lag in pipeline.edges if _s is s and lag == "none"]
            upward[s.name] = max(behind, default=0.0) + seconds[s.name]
        away = _work_until_a_wait(pipeline, seconds)
        return {s.name: (away[s.name], -upward[s.name]) for s in pipeline.stages}

    def _seconds(self, s: Stage) -> float:
        known = self._known.get(s.name)
        if known is None:
            each = GUESS_WAIT_S if self._graph.pipeline.resources[s.on] is None else GUESS_S
            return each * self._graph.parts[s.name]
        return known


def _work_until_a_wait(pipeline: Pipeline, seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns for each stage the least seconds of work, its own included, before a remote wait downstream of it.

    Paths into later steps through carried state count: a weight sync leads to the next rollout and its rewards.
    Infinity if there is no such wait: the stage fills idle intervals.
    """
    waits = {s.name for s in pipeline.stages if pipeline.resources[s.on] is None and not s.every}
    before: dict[str, list[str]] = {s.name: [] for s in pipeline.stages}
    for source, target, _field, _lag in pipeline.edges:
        if not target.every:
            before[target.name].append(source.name)
    away = dict.fromkeys(before, math.inf)
    queue: list[tuple[float, str]] = [(0.0, name) for name in sorted(waits)]
    while queue:
        so_far, name = heapq.heappop(queue)
        if so_far < away[name]:
            away[name] = so_far
            for earlier in before[name]:
                if earlier not in waits:
                    heapq.heappush(queue, (so_far + seconds[earlier], earlier))
    held_in = pipeline.states & pipeline.writer.keys()
    for s in pipeline.stages:
        if s.every:
            # No training stage reads what an optional stage writes, but the next sync waits until it has read.
            held = [away[pipeline.writer[r.field].name] for r in s.reads if r.field in held_in]
            away[s.name] = seconds[s.name] + min(held, default=math.inf)
    return away
