"""Runs a workload under a policy on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Pipeline
from dataflow.planning.costs import WorkloadCosts
from dataflow.planning.simulation.account import Account
from dataflow.planning.workload import Workload
from dataflow.policy import PolicySchedule, SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Span, Trace


def simulate(
    workload: Workload, policy: SchedulingPolicy | PolicySchedule, whole: bool = False, unlimited: bool = False
) -> tuple[Account, WorkloadCosts]:
    """Runs a workload under a policy on the virtual clock.

    Args:
        workload: what to run.
        policy: how its steps overlap.
        whole: keep every task in ``Account.trace``, to draw it.
        unlimited: simulate with unlimited slots and servers; only the end is counted.
    """
    pipeline = _unlimited(workload.pipeline) if unlimited else workload.pipeline
    graph = expand(pipeline, policy, workload.steps, workload.mini_batches, groups=workload.prompts)
    costs = WorkloadCosts(workload, graph, unlimited)
    trace = Trace(meta={"resources": dict(pipeline.resources), "steps": workload.steps, "status": "predicted"})
    account = Account(trace, workload.steps, begin=min(costs.begin(t) for t in graph.unroll(1) if not t.deps))
    left_out = graph.max_staleness if workload.uncounted else 0
    sampling = {s.name for s in pipeline.with_role("samples")}
    executor = VirtualExecutor(costs)
    ends: dict[int, float] = {}

    def on_span(span: Span) -> None:
        account.add(span)
        ends[span.step] = max(ends.get(span.step, 0.0), span.end)
        if span.step == left_out and span.stage in sampling:
            account.leave_out(span)

    def on_step(step: int, metrics: dict[str, float]) -> None:
        # A later idle interval is attributed to tasks at most a window of steps back.
        keep = ends.pop(step - graph.ahead - 2, 0.0)
        if unlimited:
            trace.spans.clear()
        elif not whole:
            # No task can begin any more before the running ones, or before the end of the last one. Tasks that take no
            # time end no wait, so that a wait is not split there.
            account.fold(min((_settled(runner, trace, pool) for pool in account.pools), default=0.0), keep)

    inputs: dict[str, Callable[[int], Any]] = dict.fromkeys(pipeline.inputs, lambda step: None)
    estimates = {name: time.mean / graph.parts.get(name, 1) for name, time in workload.times.items()}
    runner = Runner(graph, executor, inputs=inputs, trace=trace, estimates=estimates, on_step=on_step, on_span=on_span)
    asyncio.run(runner.run())
    if not unlimited:
        account.fold(account.end)
    return account, costs


def _settled(runner: Runner, trace: Trace, pool: str) -> float:
    """Returns the time before which no further task can begin on a pool."""
    since = min((s.begin for s in runner.running() if s.resource == pool), default=None)
    last = max((s.end for s in trace.spans if s.resource == pool and s.end > s.begin), default=0.0)
    return last if since is None else min(since, last)


@lru_cache(maxsize=4)
def _unlimited(pipeline: Pipeline) -> Pipeline:
    """Returns a pipeline without limits of slots."""
    return Pipeline(pipeline.stages, pipeline.inputs, dict.fromkeys(pipeline.resources))
