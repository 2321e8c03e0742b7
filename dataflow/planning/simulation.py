"""Runs workloads under policies on the virtual clock; a plan makes each of its simulations once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Pipeline
from dataflow.planning.costs import WorkloadCosts
from dataflow.planning.workload import Rewards, Workload
from dataflow.policy import PolicySchedule, SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.timeline.causes import pool_waits
from dataflow.timeline.spans import POOLS, Trace, covered


def simulate(
    workload: Workload, policy: SchedulingPolicy | PolicySchedule, unlimited: bool = False
) -> tuple[Trace, WorkloadCosts]:
    """Runs a workload under a policy on the virtual clock; the returned costs have the service's load."""
    pipeline = workload.pipeline
    if unlimited:
        pipeline = Pipeline(pipeline.stages, pipeline.inputs, dict.fromkeys(pipeline.resources))
    graph = expand(pipeline, policy, workload.steps, workload.mini_batches, groups=workload.prompts)
    costs = WorkloadCosts(workload, graph, unlimited)
    trace = Trace(meta={"resources": dict(pipeline.resources), "steps": workload.steps, "status": "predicted"})
    inputs: dict[str, Callable[[int], Any]] = dict.fromkeys(pipeline.inputs, lambda step: None)
    estimates = {name: time.mean / graph.parts.get(name, 1) for name, time in workload.times.items()}
    asyncio.run(Runner(graph, VirtualExecutor(costs), inputs=inputs, trace=trace, estimates=estimates).run())
    return trace, costs


@dataclass(frozen=True)
class Outcome:
    """The times of a simulated run, in seconds.

    Attributes:
        begin, end: the counted interval; optional tasks (validation) may end after the training of the last step.
        busy_s: in which the GPU pool works; with several pools, the mean.
        waits_s: in which it waits, by cause.
        work_s: of GPU work that training depends on, by pool.
        load_s: that each agent's service needs at least.
    """

    begin: float
    end: float
    busy_s: float
    waits_s: Mapping[str, float]
    work_s: Mapping[str, float]
    load_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        """The counted seconds."""
        return self.end - self.begin

    @classmethod
    def of(cls, workload: Workload, policy: SchedulingPolicy, unlimited: bool = False) -> Outcome:
        """Simulates a run; with unlimited slots and servers, only its end counts.

        Raises:
            PolicyError, PipelineError: the policy does not fit the workload.
        """
        trace, costs = simulate(workload, policy, unlimited)
        begin, end = trace.window
        if unlimited:
            return cls(begin, end, 0.0, {}, {}, costs.load_s)
        pools = [name for name in workload.pipeline.resources if name in POOLS]
        sampling = {s.name for s in workload.pipeline.with_role("samples")}
        left_out = policy.max_staleness if workload.uncounted else 0
        work: dict[str, float] = {}
        for span in trace.spans:  # in the order of their ends
            # The next weight sync waits for a validation's rollout; nothing waits for that of the last step.
            if span.resource in POOLS and not (span.optional and span.step == workload.steps):
                work[span.resource] = work.get(span.resource, 0.0) + span.end - span.begin
            if span.step == left_out and span.stage in sampling:
                begin = span.end
                work.clear()
        busy = [covered(((s.begin, s.end) for s in trace.spans if s.resource == on), begin, end) for on in pools]
        waits = pool_waits(trace, (begin, end), pools)
        return cls(begin, end, sum(busy) / len(pools) if pools else 0.0, waits, work, costs.load_s)


class Outcomes:
    """The outcomes of a plan's simulations, each of which is made once."""

    def __init__(self) -> None:
        self._known: list[tuple[tuple[Workload, SchedulingPolicy, bool], Outcome]] = []

    def of(self, workload: Workload, policy: SchedulingPolicy, unlimited: bool = False) -> Outcome:
        """Returns the outcome of a simulation: see :meth:`Outcome.of`."""
        # What the outcome does not depend on is left out.
        load = replace(workload, source="", assumptions=(), logged=None, loop=None)
        if unlimited:
            beside = {name: _without_limits(rewards) for name, rewards in load.beside.items()}
            load = replace(load, rewards=_without_limits(load.rewards), beside=beside)
        wanted = (load, policy, unlimited)
        for known, outcome in self._known:
            if known == wanted:
                return outcome
        outcome = Outcome.of(*wanted)
        self._known.append((wanted, outcome))
        return outcome


def _without_limits(rewards: Rewards) -> Rewards:
    return replace(rewards, concurrency=1, rpm=None, agent="continuous")
