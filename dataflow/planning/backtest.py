"""A run beside its own prediction: where the planner's model of it is off, stage by stage."""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.planning.config import PlanConfig
from dataflow.planning.planner import simulate
from dataflow.planning.sources.trace import of_trace
from dataflow.policy import SchedulingPolicy
from dataflow.timeline.attribution import summary
from dataflow.timeline.spans import Trace


@dataclass(frozen=True)
class Line:
    """One number of a run: measured and predicted, in seconds over the whole run."""

    what: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float | None:
        """The prediction's error as a share of what was measured; None where nothing was."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None


def backtest(trace: Trace, source: str) -> tuple[list[Line], Trace]:
    """Predicts a run from its own trace, under its own policy.

    Args:
        trace: of the run.
        source: its name.

    Returns:
        Wall time, GPU-pool work and exposed wait, then a line a stage; and the predicted trace.

    Raises:
        DataError: the trace is of no whole step, or of an older dataflow.
    """
    workload = of_trace(trace, source, PlanConfig())
    meta = trace.meta
    policy = SchedulingPolicy(
        int(meta.get("split", 1)),
        int(meta.get("max_staleness", 0)),
        meta.get("order", "arrival"),
        bool(meta.get("stream_rollout", False)),
    )
    predicted = simulate(workload, policy, whole=True)[0].trace
    predicted.meta["policy"] = f"{meta.get('policy', 'run')} predicted"
    was, told = summary(trace), summary(predicted)
    lines = [
        Line("wall time", was["wall_s"], told["wall_s"]),
        Line("GPU pool busy", was["gpu_busy_s"], told["gpu_busy_s"]),
        Line("exposed wait", was["exposed_wait_s"], told["exposed_wait_s"]),
    ]
    for stage in trace.stages:
        of = told["stages"].get(stage, {"total_s": 0.0})
        lines.append(Line(stage, was["stages"][stage]["total_s"], of["total_s"]))
    return lines, predicted
