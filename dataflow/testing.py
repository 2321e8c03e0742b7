"""For tests of pipelines and policies: GRPO's stages without engines, and the invariants of every trace.

graph = expand(grpo_pipeline(), preset("both", 4), steps=10, mini_batches=4, groups=16)
check_trace(simulate(graph, seconds), graph)
"""

from __future__ import annotations

import graphlib
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

from dataflow.graph import Pipeline, Task, TaskGraph, TaskId
from dataflow.planning.workload import grpo, val_rollout, val_score
from dataflow.timeline.spans import Span, Trace


def grpo_pipeline(val_every: int | None = None, resources: Mapping[str, int | None] | None = None) -> Pipeline:
    """Returns a pipeline of the stages of a GRPO step without engines, to schedule and to draw.

    Args:
        val_every: number of steps from one validation to the next; None for no validation.
        resources: slots per resource; None for the defaults of :class:`~dataflow.graph.Pipeline`.
    """
    validation = [s.bind(every=val_every) for s in (val_rollout, val_score)] if val_every else []
    return Pipeline([*grpo(reference=False).stages, *validation], inputs=["prompts"], resources=resources)


def check_trace(trace: Trace, graph: TaskGraph, tolerance: float = 1e-9, busy: bool = True) -> None:
    """Checks that the trace of a finished run fits its task graph.

    Every task ran exactly once, after all its dependencies; no resource ran more tasks than it has slots; no ready task
    waited beside a free slot; each reader of a state ran between the write of its version and the next write; the
    makespan is at least the critical path, and at least each resource's load divided by its slots.

    Args:
        tolerance: seconds by which clocks may differ.
        busy: whether to check for free slots; a real executor leaves some free between two tasks.

    Raises:
        AssertionError: an invariant is broken; the message names the tasks.
    """
    tasks = {t.id: t for step in range(graph.first, graph.steps + 1) for t in graph.unroll(step)}
    spans: dict[TaskId, Span] = {}
    for span in trace.spans:
        i = TaskId(span.step, span.stage, span.part, span.parts)
        assert i not in spans, f"{i} ran twice"
        assert i in tasks, f"{i} is not a task of the graph"
        spans[i] = span
    missing = [str(i) for i in tasks if i not in spans]
    assert not missing, f"never ran: {', '.join(missing)}"
    for i, task in tasks.items():
        for dep in task.deps:
            assert _ready_at(spans, graph, dep) <= spans[i].begin + tolerance, f"{i} began before {dep} ended"
    _check_versions(graph, spans, tolerance)
    for resource, slots in graph.pipeline.resources.items():
        _check_slots(resource, slots, [s for s in trace.spans if s.resource == resource], tolerance)
        if busy:
            _check_busy(graph, tasks, spans, resource, slots)
    _check_makespan(graph, tasks, spans, tolerance)


def _ready_at(spans: Mapping[TaskId, Span], graph: TaskGraph, dep: TaskId) -> float:
    """Returns when a task ended, or when a chunk was emitted, by its id."""
    span = spans[graph.pipeline.task_of(dep)]
    return float(span.args["emitted_s"][dep.part]) if graph.pipeline.task_of(dep) != dep else span.end


def _check_slots(resource: str, slots: int | None, spans: Sequence[Span], tolerance: float) -> None:
    if slots is None:
        return
    changes = sorted([(s.begin + tolerance, 1) for s in spans] + [(s.end, -1) for s in spans])
    level = 0
    for time, change in changes:
        level += change
        assert level <= slots, f"{level} tasks on {resource} at {time:.3f} s, it has {slots} slots"


def _check_busy(
    graph: TaskGraph,
    tasks: Mapping[TaskId, Task],
    spans: Mapping[TaskId, Span],
    resource: str,
    slots: int | None,
) -> None:
    """Checks that no task, once ready, waited while its resource had a free slot."""
    changes: dict[float, int] = {}
    for span in spans.values():
        if span.resource == resource:
            changes[span.begin] = changes.get(span.begin, 0) + 1
            changes[span.end] = changes.get(span.end, 0) - 1
    times = sorted(changes)
    levels: list[int] = []
    for time in times:
        levels.append((levels[-1] if levels else 0) + changes[time])
    unrolled = _unrolled(graph, tasks, spans)
    for i, task in tasks.items():
        if task.stage.on != resource:
            continue
        ready = max([unrolled[i.step], *(_ready_at(spans, graph, dep) for dep in task.deps)])
        begin = spans[i].begin
        if begin <= ready:
            continue
        assert slots is not None, f"{i} could start at {ready:.3f} s on {resource}, it did at {begin:.3f} s"
        while_waiting = levels[max(0, bisect_right(times, ready) - 1) : bisect_left(times, begin)]
        assert min(while_waiting, default=0) >= slots, f"{i} waited from {ready:.3f} s beside a free slot of {resource}"


def _unrolled(graph: TaskGraph, tasks: Mapping[TaskId, Task], spans: Mapping[TaskId, Span]) -> dict[int, float]:
    """Returns when the scheduler unrolled each step."""
    done = dict.fromkeys(range(graph.first, graph.steps + 1), 0.0)
    for i, task in tasks.items():
        if task.stage.every is None:
            done[i.step] = max(done[i.step], spans[i].end)
    for before, step in pairwise(done):
        done[step] = max(done[step], done[before])
    return {step: done.get(step - graph.ahead - 1, 0.0) for step in done}


def _check_versions(graph: TaskGraph, spans: Mapping[TaskId, Span], tolerance: float) -> None:
    """Checks that each reader of a state ran after the write of its version and before the next write."""
    lags = {"none": 0, "latest": 1}
    writes: dict[tuple[str, int], tuple[float, float]] = {}
    for i, span in spans.items():
        begin, end = writes.get((i.stage, i.step), (span.begin, span.end))
        writes[i.stage, i.step] = (min(begin, span.begin), max(end, span.end))
    for i, span in spans.items():
        for read in graph.pipeline.by_name[i.stage].reads:
            writer = graph.pipeline.writer.get(read.field)
            if writer is None or writer.name == i.stage or read.field not in graph.pipeline.states:
                continue
            version = i.step - lags.get(read.lag, 1 + graph.staleness(i.step))
            if version >= graph.first:
                assert writes[writer.name, version][1] <= span.begin + tolerance, (
                    f"{i} began before {writer.name}[{version}], whose {read.field} it reads, ended"
                )
            later = writes.get((writer.name, max(version + 1, graph.first)))
            assert later is None or span.end <= later[0] + tolerance, (
                f"{i} reads {read.field} of step {version}, but {writer.name} overwrote it meanwhile"
            )


def _check_makespan(
    graph: TaskGraph, tasks: Mapping[TaskId, Task], spans: Mapping[TaskId, Span], tolerance: float
) -> None:
    # The task that each one waits for, and the seconds of it that are left when what is read of it is there: a task
    # that reads a chunk depends on the time until its emission, not on the whole task.
    waits: dict[TaskId, list[tuple[TaskId, float]]] = {}
    for i, task in tasks.items():
        sources = ((dep, graph.pipeline.task_of(dep)) for dep in task.deps)
        waits[i] = [(of, spans[of].end - _ready_at(spans, graph, dep)) for dep, of in sources]
    finish: dict[TaskId, float] = {}
    for i in graphlib.TopologicalSorter({i: [of for of, _left in each] for i, each in waits.items()}).static_order():
        took = spans[i].end - spans[i].begin
        finish[i] = max((finish[of] - left for of, left in waits[i]), default=0.0) + took
    makespan = max((s.end for s in spans.values()), default=0.0) - min((s.begin for s in spans.values()), default=0.0)
    path = max(finish.values(), default=0.0)
    slack = tolerance * max(1, len(spans))
    assert makespan >= path - slack, f"makespan {makespan:.3f} s is below the critical path, {path:.3f} s"
    for resource, slots in graph.pipeline.resources.items():
        load = sum(s.end - s.begin for s in spans.values() if s.resource == resource)
        assert slots is None or makespan >= load / slots - slack, f"makespan is below the load of {resource}"
