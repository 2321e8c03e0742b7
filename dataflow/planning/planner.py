"""Predicts a workload under any policy on the virtual clock: its time and its lower bounds, also over a knob."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dataflow.errors import ConfigError, nearest
from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import Pipeline
from dataflow.planning.costs import WorkloadCosts
from dataflow.planning.workload import Workload
from dataflow.policy import PRESETS, PolicySchedule, SchedulingPolicy, divisors, expand, preset
from dataflow.runner import Runner
from dataflow.timeline.causes.attribution import pool_waits
from dataflow.timeline.spans import POOLS, Span, Trace, covered

ROWS = (*PRESETS, "both+stream")
"""The default policies of a plan."""
FEW = 12
"""Steps simulated to estimate a critical path that is far below the other bounds."""
BOUNDS = {"gpu": "GPU pool", "reward": "reward service", "path": "critical path"}


def bound_of(agent: str) -> str:
    """Returns the name of the bound that an agent's service sets."""
    return BOUNDS["reward"] if agent == "reward" else f"service of {agent}"


@dataclass
class Account:
    """Accumulates the times of a simulated run, so that memory does not grow with its length.

    Attributes:
        trace: of the run; counted spans are dropped unless the whole trace is kept.
        steps: number of steps; optional tasks (validation) may end after the training of the last one.
        begin, end: the counted interval, in seconds.
        busy_s: seconds of it in which the GPU pool works; with several pools, the mean.
        waits_s: cause -> seconds of it in which the GPU pool waits.
        stages_s: stage -> (seconds, tasks).
        work_s: pool -> seconds of GPU work that training depends on.
    """

    trace: Trace
    steps: int
    begin: float = 0.0
    end: float = 0.0
    busy_s: float = 0.0
    waits_s: dict[str, float] = field(default_factory=dict)
    stages_s: dict[str, tuple[float, int]] = field(default_factory=dict)
    work_s: dict[str, float] = field(default_factory=dict)
    _to: float | None = None

    @property
    def pools(self) -> list[str]:
        """The run's GPU pools, including those without a span in the trace."""
        return [name for name in self.trace.meta["resources"] if name in POOLS]

    def add(self, span: Span) -> None:
        """Adds a task."""
        took = span.end - span.begin
        seconds, tasks = self.stages_s.get(span.stage, (0.0, 0))
        self.stages_s[span.stage] = (seconds + took, tasks + 1)
        if not span.optional:
            self.end = max(self.end, span.end)
        # The next weight sync waits for a validation's rollout; nothing waits for that of the last step.
        if span.resource in POOLS and not (span.optional and span.step == self.steps):
            self.work_s[span.resource] = self.work_s.get(span.resource, 0.0) + took

    def leave_out(self, span: Span) -> None:
        """Restarts the count at the end of this task."""
        self.begin = span.end
        self.work_s.clear()

    def fold(self, until: float, keep: float = -math.inf) -> None:
        """Counts waits up to a time before which no further task can begin; drops tasks that ended before ``keep``."""
        begin = self.begin if self._to is None else self._to
        if until <= begin:
            return
        pools = self.pools
        for cause, seconds in pool_waits(self.trace, (begin, until), pools).items():
            self.waits_s[cause] = self.waits_s.get(cause, 0.0) + seconds
        for pool in pools:
            busy = covered(((s.begin, s.end) for s in self.trace.spans if s.resource == pool), begin, until)
            self.busy_s += busy / len(pools)
        self._to = until
        self.trace.spans[:] = [s for s in self.trace.spans if s.end >= keep]


@dataclass(frozen=True)
class Prediction:
    """The prediction for one policy; times in seconds.

    Attributes:
        policy: its name.
        step_s: time per step.
        total_s: time of the whole training.
        change: of the total against baseline, -0.3 for 30% less.
        gpu_idle: share of the total in which the GPU pool is idle.
        exposed_wait_s: exposed wait per step.
        exposed_wait_by_cause: the same by cause.
        lower_bound_s: lower bound on the total of any schedule of this policy's graph.
        bound_by: the source of the bound: "GPU pool", "reward service", "service of" a further agent, or
            "critical path".
        bounds_s: all bounds; a critical path far below the others is estimated.
    """

    policy: str
    step_s: float
    total_s: float
    change: float
    gpu_idle: float
    exposed_wait_s: float
    exposed_wait_by_cause: dict[str, float]
    lower_bound_s: float
    bound_by: str
    bounds_s: dict[str, float]

    @property
    def lower_bound_step_s(self) -> float:
        """The lower bound per step."""
        return self.lower_bound_s * self.step_s / self.total_s if self.total_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the prediction as a JSON-serializable dictionary."""
        return asdict(self)


def predict(
    workload: Workload,
    policies: Mapping[str, SchedulingPolicy] | None = None,
    on_policy: Callable[[str], None] = lambda name: None,
) -> list[Prediction]:
    """Predicts a workload under several policies.

    Args:
        workload: what to run.
        policies: by display name; :data:`ROWS` by default.
        on_policy: called with each policy's name before its simulation, for a progress display.

    Raises:
        PolicyError, PipelineError: a policy does not fit the workload.
    """
    if policies is None:
        policies = {name: preset(name, workload.mini_batches) for name in ROWS}
    rows: list[Prediction] = []
    base: float | None = None
    for name, policy in policies.items():
        on_policy(name)
        account, costs = simulate(workload, policy)
        if base is None:
            first = preset("baseline", workload.mini_batches)
            base = total_s(account) if policy == first else total_s(simulate(workload, first)[0])
        rows.append(_prediction(name, workload, policy, account, costs, base))
    return rows


def total_s(account: Account) -> float:
    """Returns the counted seconds of a run."""
    return account.end - account.begin


def _prediction(
    name: str, workload: Workload, policy: SchedulingPolicy, account: Account, costs: WorkloadCosts, base: float
) -> Prediction:
    total = total_s(account)
    steps = workload.steps
    # Requests of the uncounted rollouts, but for the last one, may be answered before the count begins.
    early = account.begin if policy.max_staleness > 1 or policy.stream_rollout else 0.0
    bounds = {BOUNDS["gpu"]: max(account.work_s.values(), default=0.0)}
    bounds |= {bound_of(agent): max(0.0, load - early) for agent, load in costs.load_s.items()}
    path = _path_s(workload, policy, below=max(bounds.values()))
    bounds[BOUNDS["path"]] = max(0.0, path - account.begin)
    bound_by = max(bounds, key=lambda key: bounds[key])
    waits = {cause: s / steps for cause, s in sorted(account.waits_s.items(), key=lambda i: -i[1])}
    return Prediction(
        policy=name,
        step_s=total / steps,
        total_s=total,
        change=total / base - 1 if base else 0.0,
        # Sums of the same spans in another order may exceed the total by a rounding error.
        gpu_idle=max(0.0, 1 - account.busy_s / total) if total else 0.0,
        exposed_wait_s=sum(waits.values()),
        exposed_wait_by_cause=waits,
        lower_bound_s=bounds[bound_by],
        bound_by=bound_by,
        bounds_s=bounds,
    )


def _path_s(workload: Workload, policy: SchedulingPolicy, below: float) -> float:
    """Returns the critical path: when the run would end with unlimited slots and servers.

    A path far below the other bounds is estimated from its first steps.
    """
    if workload.steps > FEW:
        few = replace(workload, steps=FEW)
        path = simulate(few, policy, unlimited=True)[0].end * workload.steps / FEW
        if path < 0.8 * below:
            return path
    return simulate(workload, policy, unlimited=True)[0].end


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
    pipeline = workload.pipeline
    if unlimited:
        pipeline = Pipeline(pipeline.stages, pipeline.inputs, dict.fromkeys(pipeline.resources))
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


# --- sweeps -----------------------------------------------------------------------------------------------------------

_LIMITS = ("concurrency", "rpm")


@dataclass(frozen=True)
class Sweep:
    """Predictions over the values of one knob: one row of predictions per value."""

    knob: str
    values: tuple[float, ...]
    rows: tuple[tuple[Prediction, ...], ...]

    def as_dict(self) -> dict[str, Any]:
        """Returns {"knob", "values", "policies": [{"policy", "step_s", "lower_bound_s"}]}, in seconds per step."""
        policies = []
        for at, first in enumerate(self.rows[0]):
            times = [row[at].step_s for row in self.rows]
            bounds = [row[at].lower_bound_step_s for row in self.rows]
            policies.append({"policy": first.policy, "step_s": times, "lower_bound_s": bounds})
        return {"knob": self.knob, "values": list(self.values), "policies": policies}


def parse_sweep(text: str, workload: Workload) -> tuple[str, tuple[float, ...]]:
    """Returns knob and values of ``reward.concurrency:64:2048`` (doubling) or ``mini_batches:1:16`` (divisors).

    Each reward agent has the knobs of reward under its own name, and each served reward model ``replicas``.

    Raises:
        ConfigError: an unknown knob, or a range without a value.
    """
    knob, *ends = text.split(":")
    knobs = [
        *(f"{agent}.{limit}" for agent in workload.agents for limit in _LIMITS),
        *_models(workload),
        "mini_batches",
    ]
    if knob not in knobs:
        raise ConfigError(f"sweep={text}: no knob is named '{knob}'{nearest(knob, knobs)} (knobs: {', '.join(knobs)}).")
    try:
        low, high = (float(end) for end in ends)
    except ValueError as error:
        raise ConfigError(f"sweep={text} is not of the form {knob}:LOW:HIGH (two numbers).") from error
    if not 1 <= low <= high < math.inf:
        raise ConfigError(f"sweep={text}: give 1 <= LOW <= HIGH.")
    if knob == "mini_batches":
        values = [float(d) for d in divisors(workload.prompts) if low <= d <= high]
        if not values:
            raise ConfigError(f"sweep={text}: no number from {low:g} to {high:g} divides {workload.prompts} prompts.")
        return knob, tuple(values)
    values = [low]
    while values[-1] * 2 < high:
        values.append(values[-1] * 2)
    if high > low:
        values.append(high)
    whole = knob.endswith((".concurrency", ".replicas"))
    return knob, tuple(math.floor(v) if whole else v for v in values)


def _models(workload: Workload) -> dict[str, str]:
    """Returns the knob of each reward model's number of servers: the agent that it scores for."""
    servers = {agent: workload.service_of(agent).servers for agent in workload.agents}
    return {f"reward.models.{of.model}.replicas": agent for agent, of in servers.items() if of is not None}


def turned(workload: Workload, knob: str, value: float) -> Workload:
    """Returns the workload with a knob set to a value."""
    if knob == "mini_batches":
        return replace(workload, mini_batches=int(value))
    if (agent := _models(workload).get(knob)) is not None:
        return workload.with_service(agent, workload.service_of(agent).with_replicas(int(value)))
    agent, _, limit = knob.rpartition(".")
    of = workload.service_of(agent)
    changed = replace(of, concurrency=int(value)) if limit == "concurrency" else replace(of, rpm=value)
    return workload.with_service(agent, changed)


def sweep(
    workload: Workload, text: str, names: Sequence[str] = ROWS, on_value: Callable[[str], None] = lambda text: None
) -> Sweep:
    """Predicts presets at each value of a knob.

    Args:
        workload: what to run.
        text: the knob and its range, see :func:`parse_sweep`.
        names: names of the presets.
        on_value: called before each prediction, for a progress display.
    """
    knob, values = parse_sweep(text, workload)
    rows = []
    for value in values:
        at = turned(workload, knob, value)
        policies = {name: preset(name, at.mini_batches) for name in names}
        rows.append(tuple(predict(at, policies, lambda name, v=value: on_value(f"{name}, {knob}={v:g}"))))  # type: ignore[misc]
    return Sweep(knob, values, tuple(rows))
