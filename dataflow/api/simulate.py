"""Simulates a task graph on the virtual clock, from the seconds that each stage takes."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Mapping

from dataflow.api.run import outside_a_loop
from dataflow.api.trace import Trace
from dataflow.errors import ConfigError, nearest
from dataflow.executors.virtual import Costs, End, VirtualExecutor, chunks_of, groups_by_index
from dataflow.graph import Task, TaskGraph
from dataflow.runner import Runner


class StepSeconds(Costs):
    """The same seconds for each step of a stage, shared equally by its tasks of the step.

    A stage that collects rewards takes no time of its own: they arrive evenly over its seconds, counted from the end of
    the request, in the order of the groups. Without a stage that requests, it is a stage like any other.

    Args:
        graph: whose tasks run.
        seconds: by stage.
        capacity: groups whose rewards come at once to a collecting stage, earlier steps first; None for any number.
    """

    def __init__(self, graph: TaskGraph, seconds: Mapping[str, float], capacity: int | None = None) -> None:
        self._seconds = seconds
        self._capacity = capacity
        self._busy: dict[str, list[float]] = {}
        self._ends: dict[tuple[str, int], list[float]] = {}
        self._groups = graph.groups or 1
        self._requests = {s.name for s in graph.pipeline.with_role("requests")}
        self._requested: dict[int, float] = {}

    def start(self, task: Task, groups: tuple[int, ...] | None, now: float) -> End:
        """See :meth:`Costs.start`."""
        i, stage = task.id, task.stage
        seconds = self._seconds[i.stage]
        if stage.collects:
            chosen = groups_by_index(task, self._groups)
            if self._capacity is not None:
                ends = self._served(i.stage, i.step, self._requested.get(i.step, now), self._capacity)
                return End(max(now, *(ends[group] for group in chosen)), groups=chosen)
            if self._requests:
                return End(max(now, self._requested[i.step] + seconds * (i.part + 1) / i.parts), groups=chosen)
            return End(now + seconds / i.parts, groups=chosen)
        end = now + seconds / i.parts
        if i.stage in self._requests:
            self._requested.setdefault(i.step, end)
        return End(end, chunks=chunks_of(task, self._groups, now, end))

    def _served(self, stage: str, step: int, at: float, capacity: int) -> list[float]:
        """Returns when the rewards of each group of a step are there, which are asked for all at once."""
        if (stage, step) not in self._ends:
            busy = self._busy.setdefault(stage, [0.0] * capacity)
            each = self._seconds[stage] / math.ceil(self._groups / capacity)  # alone, a step takes its seconds
            ends = self._ends[stage, step] = []
            for _ in range(self._groups):
                ends.append(max(at, busy[0]) + each)
                heapq.heapreplace(busy, ends[-1])
        return self._ends[stage, step]


def simulate(graph: TaskGraph, costs: Costs | Mapping[str, float], capacity: int | None = None) -> Trace:
    """Runs a task graph on the virtual clock, without calling any stage.

    Args:
        graph: of :func:`dataflow.expand`.
        costs: seconds of each stage in one step, all its tasks together; for a stage that collects rewards, the seconds
            from the request to the last reward of a step alone. Or an object that gives the end of each task.
        capacity: groups whose rewards the service computes at once, so that steps wait for each other; None for any
            number.

    Returns:
        The trace, in seconds from the first task.

    Raises:
        ConfigError: a stage has no seconds or wrong ones, there is no such stage, or the capacity is none.

    >>> from dataflow import Pipeline, expand, preset, stage
    >>> @stage(writes="text", on="gpu")
    ... def write(prompts): ...
    >>> graph = expand(Pipeline([write], inputs=["prompts"]), preset("baseline", 1), steps=3)
    >>> simulate(graph, {"write": 2.0}).wall
    6.0
    """
    pipeline = graph.pipeline
    if capacity is not None and (isinstance(costs, Costs) or type(capacity) is not int or capacity < 1):
        raise ConfigError(
            f"simulate: capacity={capacity!r}: give a whole number of at least 1, beside the seconds of each stage."
        )
    if not isinstance(costs, Costs):
        names = [s.name for s in pipeline.stages]
        if missing := [name for name in names if name not in costs]:
            raise ConfigError(f"simulate: no seconds for stage {', '.join(map(repr, missing))}; give all of a step.")
        if unknown := [name for name in costs if name not in names]:
            raise ConfigError(f"simulate: there is no stage '{unknown[0]}'{nearest(unknown[0], names) or '.'}")
        for name, seconds in costs.items():
            if not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
                raise ConfigError(f"simulate: stage '{name}' takes {seconds!r} s; give a finite time of 0 or more.")
        costs = StepSeconds(graph, costs, capacity)
    trace = Trace(meta={"resources": dict(pipeline.resources), "steps": graph.steps, "status": "finished"})
    trace.meta["job"] = {"pipeline": pipeline.facts()}
    inputs = dict.fromkeys(pipeline.inputs, lambda _step: None)
    runner = Runner(graph, VirtualExecutor(costs), inputs=inputs, trace=trace)
    outside_a_loop(lambda: asyncio.run(runner.run()))
    return trace
