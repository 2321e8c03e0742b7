"""Compares a run with its own prediction, stage by stage, to show where the planner's model is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dataflow.errors import ConfigError
from dataflow.planning.config import PlanConfig
from dataflow.planning.simulation import simulate
from dataflow.planning.sources.trace import of_trace, policy_of
from dataflow.policy import PolicySchedule
from dataflow.timeline import files
from dataflow.timeline.causes.attribution import summary
from dataflow.timeline.compare import summary_of
from dataflow.timeline.spans import Trace
from dataflow.timeline.text import table


class Row(NamedTuple):
    """One quantity of a run, in seconds over the whole run; the error is None where nothing was measured."""

    what: str
    measured_s: float
    predicted_s: float
    error: float | None


def backtest(trace: Trace, source: str) -> tuple[list[Row], Trace]:
    """Predicts a run from its own trace, under its own policy, or the policies that it changed to.

    Returns:
        A row each for wall time, GPU-pool work, exposed wait and each stage; and the predicted trace.

    Raises:
        DataError: the trace has no complete step.
    """
    meta = trace.meta
    changes = [(int(each["step"]), policy_of(each)) for each in meta.get("policies") or ()]
    policy = PolicySchedule(tuple(changes)) if changes else policy_of(meta)
    predicted = simulate(of_trace(trace, source, PlanConfig()), policy)[0]
    predicted.meta["policy"] = f"{meta.get('policy', 'run')} predicted"
    measured, expected = summary(trace), summary(predicted)
    pairs = {
        "wall time": (measured["wall_s"], expected["wall_s"]),
        "GPU pool busy": (measured["gpu_busy_s"], expected["gpu_busy_s"]),
        "exposed wait": (measured["exposed_wait_s"], expected["exposed_wait_s"]),
    }
    for stage in trace.stages:
        pairs[stage] = measured["stages"][stage]["total_s"], expected["stages"].get(stage, {"total_s": 0.0})["total_s"]
    return [Row(what, a, b, b / a - 1 if a else None) for what, (a, b) in pairs.items()], predicted


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
        return json.dumps([line._asdict() for line in lines], indent=1)
    cells = [("seconds in all", "measured", "predicted", "error")]
    for at in lines:
        error = "-" if at.error is None else f"{at.error:+.1%}"
        cells.append((at.what, f"{at.measured_s:.2f}", f"{at.predicted_s:.2f}", error))
    return table(cells) + files.written(out)
