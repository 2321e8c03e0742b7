"""Predicts a workload under any policy on the virtual clock: its time and its lower bounds, also over a knob."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dataflow.drawing.duration import figure
from dataflow.errors import ConfigError, counted, nearest
from dataflow.planning.config import MOST_IN_FLIGHT
from dataflow.planning.simulation import Outcomes
from dataflow.planning.workload import Workload
from dataflow.policy import PRESETS, STREAM, SchedulingPolicy, divisors, preset

ROWS = (*PRESETS, "both+stream")
"""The default policies of a plan."""
FEW = 12
"""Steps simulated to estimate a critical path that is far below the other bounds."""
AS_LOGGED = "as logged"
"""The row of the source's own run, replayed."""
BOUNDS = {"gpu": "GPU pool", "reward": "reward service", "path": "critical path"}


def bound_of(agent: str) -> str:
    """Returns the name of the bound that an agent's service sets."""
    return BOUNDS["reward"] if agent == "reward" else f"service of {agent}"


def numbers_of(policy: SchedulingPolicy) -> str:
    """Returns a policy's numbers, its name where no preset has one: ``split=2 staleness=3+stream``."""
    return f"split={policy.split} staleness={policy.max_staleness}" + (STREAM if policy.stream_rollout else "")


def name_of(policy: SchedulingPolicy, mini_batches: int, first: str = "") -> str:
    """Returns the name of a policy: that of a preset with the same numbers, ``first`` if it is one of several."""
    names = [*filter(None, [first]), *PRESETS, *(name + STREAM for name in PRESETS)]
    same = (name for name in names if replace(preset(name, mini_batches), order=policy.order) == policy)
    return next(same, numbers_of(policy))


@dataclass(frozen=True)
class Prediction:
    """The prediction for one policy; times in seconds.

    Attributes:
        change: of the total against baseline, -0.3 for 30% less.
        gpu_idle: share of the total in which the GPU pool is idle.
        exposed_wait_s, exposed_wait_by_cause: per step.
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
        return self.per_step(self.lower_bound_s)

    def per_step(self, seconds: float) -> float:
        """Returns the share of a step in seconds of the whole training."""
        return seconds * self.step_s / self.total_s if self.total_s else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns the prediction as a JSON-serializable dictionary."""
        return asdict(self)


def predict(
    workload: Workload,
    policies: Mapping[str, SchedulingPolicy] | None = None,
    on_policy: Callable[[str], None] = lambda name: None,
    outcomes: Outcomes | None = None,
) -> list[Prediction]:
    """Predicts a workload under several policies, by display name; :data:`ROWS` by default.

    ``on_policy`` is called with each policy's name before its simulation, for a progress display; ``outcomes`` are of
    the plan's simulations so far.
    """
    if policies is None:
        policies = {name: preset(name, workload.mini_batches) for name in ROWS}
    outcomes, rows = outcomes or Outcomes(), []
    for name, policy in policies.items():
        on_policy(name)
        rows.append(_prediction(name, workload, policy, outcomes))
    return rows


def _prediction(name: str, workload: Workload, policy: SchedulingPolicy, outcomes: Outcomes) -> Prediction:
    found = outcomes.of(workload, policy)
    base = outcomes.of(workload, preset("baseline", workload.mini_batches)).total_s
    total, steps = found.total_s, workload.steps
    # Requests of the uncounted rollouts, but for the last one, may be answered before the count begins.
    early = found.begin if policy.max_staleness > 1 or policy.stream_rollout else 0.0
    bounds = {BOUNDS["gpu"]: max(found.work_s.values(), default=0.0)}
    bounds |= {bound_of(agent): max(0.0, load - early) for agent, load in found.load_s.items()}
    path = _path_s(workload, policy, max(bounds.values()), outcomes)
    bounds[BOUNDS["path"]] = max(0.0, path - found.begin)
    bound_by = max(bounds, key=lambda key: bounds[key])
    waits = {cause: s / steps for cause, s in sorted(found.waits_s.items(), key=lambda i: -i[1])}
    return Prediction(
        policy=name,
        step_s=total / steps,
        total_s=total,
        change=total / base - 1 if base else 0.0,
        # Sums of the same spans in another order may exceed the total by a rounding error.
        gpu_idle=max(0.0, 1 - found.busy_s / total) if total else 0.0,
        exposed_wait_s=sum(waits.values()),
        exposed_wait_by_cause=waits,
        lower_bound_s=bounds[bound_by],
        bound_by=bound_by,
        bounds_s=bounds,
    )


def _path_s(workload: Workload, policy: SchedulingPolicy, below: float, outcomes: Outcomes) -> float:
    """Returns the critical path: when the run would end with unlimited slots and servers.

    A path far below the other bounds is estimated from its first steps.
    """
    if workload.steps > FEW:
        few = replace(workload, steps=FEW)
        path = outcomes.of(few, policy, unlimited=True).end * workload.steps / FEW
        if path < 0.8 * below:
            return path
    return outcomes.of(workload, policy, unlimited=True).end


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
        policies = [
            {
                "policy": column[0].policy,
                "step_s": [row.step_s for row in column],
                "lower_bound_s": [row.lower_bound_step_s for row in column],
            }
            for column in zip(*self.rows, strict=True)
        ]
        return {"knob": self.knob, "values": list(self.values), "policies": policies}

    def cells(self) -> list[tuple[str, ...]]:
        """Returns its table with the head."""
        lines = [(self.knob, *(row.policy for row in self.rows[0]), "lower bound")]
        for value, rows in zip(self.values, self.rows, strict=True):
            bound = min(row.lower_bound_step_s for row in rows)
            lines.append((f"{value:g}", *(figure(row.step_s) for row in rows), figure(bound)))
        return lines


def parse_sweep(text: str, workload: Workload) -> tuple[str, tuple[float, ...]]:
    """Returns knob and values of ``reward.concurrency:64:2048`` (doubling) or ``mini_batches:1:16`` (divisors).

    Each reward agent has the knobs of reward under its own name.
    """
    knob, *ends = text.split(":")
    knobs = [
        *(f"{agent}.{limit}" for agent, collect in workload.agents.items() if collect for limit in _LIMITS),
        "mini_batches",
    ]
    if knob not in knobs:
        raise ConfigError(f"sweep={text}: no knob is named '{knob}'{nearest(knob, knobs)} (knobs: {', '.join(knobs)}).")
    try:
        low, high = map(float, ends)
    except ValueError as error:
        raise ConfigError(f"sweep={text} is not of the form {knob}:LOW:HIGH (two numbers).") from error
    if not 1 <= low <= high <= MOST_IN_FLIGHT:
        raise ConfigError(f"sweep={text}: give 1 <= LOW <= HIGH <= {MOST_IN_FLIGHT:,}.")
    if knob == "mini_batches":
        values = [float(d) for d in divisors(workload.prompts) if low <= d <= high]
        if not values:
            raise ConfigError(
                f"sweep={text}: no number from {low:g} to {high:g} divides {counted(workload.prompts, 'prompt')}."
            )
        return knob, tuple(values)
    values = [low]
    while values[-1] < high:
        values.append(min(values[-1] * 2, high))
    return knob, tuple(math.floor(v) if knob.endswith(".concurrency") else v for v in values)


def turned(workload: Workload, knob: str, value: float) -> Workload:
    """Returns the workload with a knob set to a value."""
    if knob == "mini_batches":
        return replace(workload, mini_batches=int(value))
    agent, _, limit = knob.rpartition(".")
    of = workload.service_of(agent)
    changed = replace(of, concurrency=int(value)) if limit == "concurrency" else replace(of, rpm=value)
    return workload.with_service(agent, changed)


def sweep(
    workload: Workload,
    text: str,
    names: Sequence[str] = ROWS,
    on_value: Callable[[str], None] = lambda text: None,
    outcomes: Outcomes | None = None,
) -> Sweep:
    """Predicts presets at each value of a knob."""
    knob, values = parse_sweep(text, workload)
    outcomes, rows = outcomes or Outcomes(), []
    for value in values:
        at = turned(workload, knob, value)
        policies = {name: preset(name, at.mini_batches) for name in names}
        rows.append(tuple(predict(at, policies, lambda name, v=value: on_value(f"{name}, {knob}={v:g}"), outcomes)))  # type: ignore[misc]
    return Sweep(knob, values, tuple(rows))
