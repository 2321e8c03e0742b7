"""Compares a run with its own prediction, stage by stage, to show where the planner's model is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.errors import ConfigError
from dataflow.planning.config import PlanConfig
from dataflow.planning.simulation import simulate
from dataflow.planning.sources.trace import of_trace, policy_of
from dataflow.policy import PolicySchedule, SchedulingPolicy
from dataflow.timeline import files
from dataflow.timeline.causes.attribution import summary
from dataflow.timeline.compare import summary_of
from dataflow.timeline.spans import Trace
from dataflow.timeline.text import table


@dataclass(frozen=True)
class BacktestRow:
    """One quantity of a run, measured and predicted, in seconds over the whole run."""

    what: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float | None:
        """The prediction's error as a share of the measured time; None if that is 0."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None


def backtest(trace: Trace, source: str) -> tuple[list[BacktestRow], Trace]:
    """Predicts a run from its own trace, under its own policy.

    Args:
        trace: of the run.
        source: its name, for messages.

    Returns:
        A row each for wall time, GPU-pool work, exposed wait and each stage; and the predicted trace.

    Raises:
        DataError: the trace has no complete step.
    """
    workload = of_trace(trace, source, PlanConfig())
    meta = trace.meta
    predicted = simulate(workload, _policy(meta))[0]
    predicted.meta["policy"] = f"{meta.get('policy', 'run')} predicted"
    measured, expected = summary(trace), summary(predicted)
    lines = [
        BacktestRow("wall time", measured["wall_s"], expected["wall_s"]),
        BacktestRow("GPU pool busy", measured["gpu_busy_s"], expected["gpu_busy_s"]),
        BacktestRow("exposed wait", measured["exposed_wait_s"], expected["exposed_wait_s"]),
    ]
    for stage in trace.stages:
        of = expected["stages"].get(stage, {"total_s": 0.0})
        lines.append(BacktestRow(stage, measured["stages"][stage]["total_s"], of["total_s"]))
    return lines, predicted


def _policy(meta: Mapping[str, Any]) -> SchedulingPolicy | PolicySchedule:
    """Returns the policy of a run, or the policies of one that changed them."""
    if changes := meta.get("policies"):
        return PolicySchedule(tuple((int(each["step"]), policy_of(each)) for each in changes))
    return policy_of(meta)


def predicted(runs: Sequence[str], load: Callable[[str], Trace], out: str | None, as_json: bool) -> str:
    """Returns the table of one run beside its own prediction, stage by stage; arguments as of ``compare``.

    Raises:
        UserError: several runs, one that is not there, or a file that cannot be drawn.
    """
    if len(runs) != 1 or runs[0].endswith(".py"):
        raise ConfigError("compare --predicted: give one RUN, to lay beside its own prediction.")
    files.check(out)
    trace = load(runs[0])
    lines, predicted = backtest(trace, runs[0])
    if out:
        name = str(trace.meta.get("policy", "measured"))
        files.draw({name: trace, "predicted": predicted}, out, facts={name: summary_of(runs[0])})
    if as_json:
        rows = [
            {"what": at.what, "measured_s": at.measured_s, "predicted_s": at.predicted_s, "error": at.error}
            for at in lines
        ]
        return json.dumps(rows, indent=1)
    cells = [("seconds in all", "measured", "predicted", "error")]
    for at in lines:
        error = "-" if at.error is None else f"{at.error:+.1%}"
        cells.append((at.what, f"{at.measured_s:.2f}", f"{at.predicted_s:.2f}", error))
    return table(cells) + files.written(out)
