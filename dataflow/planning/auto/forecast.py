"""Seconds a step under some policies, once the pipeline is filled, predicted from the last steps of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataflow.errors import DataError, PipelineError, PolicyError
from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Pipeline
from dataflow.planning.config import PlanConfig
from dataflow.planning.costs import WorkloadCosts
from dataflow.planning.sources.trace import of_trace
from dataflow.planning.workload import Workload
from dataflow.policy import SchedulingPolicy, divisors, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace

REQUESTS = 40_000
"""Reward requests to simulate for each policy, about."""
STEPS = (8, 16)
"""Least and most steps to simulate for each policy."""
CLOSE = 0.1
"""Policies slower than the fastest by more are not looked at with another number of parts, or streaming."""
MORE = 0.05
"""Gain of twice as many requests in flight that is worth a word."""
SPLITS = 4
"""Numbers of parts to try, at most."""


def candidates(
    pipeline: Pipeline,
    mini_batches: int,
    groups: int | None,
    *,
    limit: int,
    order: str = "arrival",
    streams: bool | None = None,
) -> list[SchedulingPolicy]:
    """Returns the policies that a pipeline can run under, with the least stale first.

    Args:
        pipeline: the stages of a step.
        mini_batches, groups: optimizer steps and prompt groups of a step.
        limit: the largest staleness.
        order: of the run.
        streams: whether the rollout may, must (True) or must not (False) stream.
    """
    splits = divisors(mini_batches)
    while len(splits) > SPLITS:
        del splits[1]  # few large parts gain little
    found = []
    for staleness in range(limit + 1):
        for stream in (False, True) if streams is None else (streams,):
            for split in splits if pipeline.collector is not None else [1]:
                policy = SchedulingPolicy(split, staleness, order, stream and pipeline.streaming)  # type: ignore[arg-type]
                if policy not in found and _fits(pipeline, policy, mini_batches, groups):
                    found.append(policy)
    return found


def _fits(pipeline: Pipeline, policy: SchedulingPolicy, mini_batches: int, groups: int | None) -> bool:
    try:
        expand(pipeline, policy, 1, mini_batches, groups=groups)
    except (PolicyError, PipelineError):
        return False
    return True


@dataclass(frozen=True)
class Forecast:
    """What is predicted from a window.

    Attributes:
        seconds: a step under each policy; None for one that cannot be predicted, or is not worth it.
        in_flight: a number of requests in flight with which the fastest policy takes less, and its seconds a step;
            None if the service or the GPU pool would not gain, or there are several services.
        reason: why nothing can be predicted; "" if something can.
    """

    seconds: list[float | None]
    in_flight: tuple[int, float] | None = None
    reason: str = ""


def forecast(
    window: Trace, policies: Sequence[SchedulingPolicy], current: SchedulingPolicy, adapted: float | None = None
) -> Forecast:
    """Returns the seconds a step under each policy, and whether more requests in flight would make it less.

    Every policy sees the same latencies and stage times, so that their differences are more exact than the times.

    Args:
        window: the last steps of a run (:func:`dataflow.planning.auto.window.window`).
        policies: to predict.
        current: the policy in force, which is predicted in any case.
        adapted: requests in flight at most at present, if the agent adapts that number.
    """
    try:
        workload = of_trace(window, "the run", PlanConfig())
    except DataError as error:
        return Forecast([None] * len(policies), reason=str(error))
    if adapted is not None:
        workload = replace(workload, rewards=replace(workload.rewards, concurrency=max(1, round(adapted))))
    seconds = _search(workload, policies, current)
    return Forecast(seconds, _in_flight(workload, dict(zip(policies, seconds, strict=True))))


def _in_flight(workload: Workload, seconds: Mapping[SchedulingPolicy, float | None]) -> tuple[int, float] | None:
    """Doubles the requests in flight, as long as the fastest policy gains; assumes that they take as long."""
    known = {policy: s for policy, s in seconds.items() if s is not None}
    if not known or workload.beside:
        return None
    best, found = min(known, key=lambda policy: known[policy]), None
    least, number = known[best], workload.rewards.concurrency
    while number < workload.prompts * workload.responses:
        number *= 2
        more = replace(workload, rewards=replace(workload.rewards, concurrency=number))
        if (took := _predicted(more, best)) is None or least / took - 1 < MORE:
            break
        found, least = (number, took), took
    return found


def _search(workload: Workload, policies: Sequence[SchedulingPolicy], current: SchedulingPolicy) -> list[float | None]:
    """Predicts the policies with the least and the most parts, then the others as stale as the fastest of them."""
    ends = {min(p.split for p in policies), max(p.split for p in policies)}
    plain = [p for p in policies if not p.stream_rollout] or policies
    found = {p: _predicted(workload, p) for p in policies if p == current or (p in plain and p.split in ends)}
    known = {p: s for p, s in found.items() if s is not None}
    near = {p.max_staleness for p, s in known.items() if s <= min(known.values()) * (1 + CLOSE)}
    found |= {p: _predicted(workload, p) for p in policies if p not in found and p.max_staleness in near}
    return [found.get(policy) for policy in policies]


def _predicted(workload: Workload, policy: SchedulingPolicy) -> float | None:
    try:
        return steady_s(workload, policy)
    except (PolicyError, PipelineError):
        return None


def steady_s(workload: Workload, policy: SchedulingPolicy) -> float:
    """Returns the seconds a step of a run that neither begins nor ends.

    Raises:
        PolicyError, PipelineError: the policy does not fit the workload.
    """
    least, most = STEPS
    counted = max(least, min(most, REQUESTS // max(1, workload.prompts * workload.responses)))
    # The measured steps repeat without the first one. Each counts as often under every policy, as they may differ much.
    cycle = max(1, workload.measured_steps - 1)
    counted = cycle * max(-(-least // cycle), counted // cycle)
    filled = 2 + policy.max_staleness
    # The last steps have no next rollout beside them, so some more follow those that count.
    steps = filled + counted + policy.max_staleness + 1
    graph = expand(workload.pipeline, policy, steps, workload.mini_batches, groups=workload.prompts)
    executor = VirtualExecutor(WorkloadCosts(workload, graph))
    ends: dict[int, float] = {}

    def on_step(step: int, _metrics: object) -> None:
        ends.setdefault(step, executor.now())
        trace.spans.clear()

    trace = Trace(meta={"resources": dict(workload.pipeline.resources)})
    inputs: dict[str, Callable[[int], Any]] = dict.fromkeys(workload.pipeline.inputs, lambda step: None)
    estimates = {name: time.mean / graph.parts.get(name, 1) for name, time in workload.times.items()}
    asyncio.run(Runner(graph, executor, inputs=inputs, trace=trace, estimates=estimates, on_step=on_step).run())
    return (ends[filled + counted] - ends[filled]) / counted
