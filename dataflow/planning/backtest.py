"""Compares a run with its own prediction, stage by stage, to show where the planner's model is wrong."""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.planning.config import PlanConfig
from dataflow.planning.planner import simulate
from dataflow.planning.sources.trace import of_trace
from dataflow.policy import SchedulingPolicy
from dataflow.timeline.attribution import summary
from dataflow.timeline.spans import Trace


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
        DataError: the trace has no complete step, or comes from an older dataflow.
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
