"""The summary of a run: made in its own process or, if that was killed, from its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.errors import DataflowError, counted
from dataflow.running.saving.checkpoints import CheckpointStore

if TYPE_CHECKING:
    from dataflow.timeline.spans import Trace

EVALUATIONS = "evaluations.json"
"""File with the trace of evaluations outside of the run's clock: before training, and after a resume."""
EARLIER = "earlier_s"
"""What a trace's meta calls the seconds of the processes before the last one of a run that was resumed."""
UNLOGGED = "unlogged"
"""What a trace's meta calls the counts, by reward agent, that the rows of metrics lack since the run was resumed."""
LAST_EVALUATIONS = 3
"""Number of last evaluations whose mean the summary has, as single ones swing by several points."""
_FACTS = ("policy", "split", "max_staleness", "order")
_FIGURES = ("wall_s", "resumed", "not_running_s", "step_s", "after_training_s", "after_training_idle_s", "gpu_busy_s",
            "exposed_wait_s", "exposed_wait_by_cause", "reward_service_s", "lower_bound_s")  # fmt: skip

_FIGURES_OF = {
    "validates": ("accuracy_before", "accuracy_after", f"accuracy_mean_last_{LAST_EVALUATIONS}", "evaluations"),
    "collects": ("rewards", "reward_service_s"),
    "syncs": ("weights_sha256",),
}
"""Figures by the role of the stages that they are about."""


def finish(directory: Path, status: str, steps: int | None) -> str:
    """Writes the summary of a run that has none, from its trace and its metrics.

    Args:
        directory: of the run.
        status: "failed" or "interrupted".
        steps: the planned number of steps.

    Returns:
        The number of steps made and what can be done, as a phrase that follows "it" or "interrupted: ".
    """
    target = directory / "summary.json"
    if not target.exists():
        from dataflow.running.reporting.tracking import write_summary

        try:
            write_summary(target, _summary(directory, status))
        except (OSError, DataflowError) as error:
            return f"stopped, and its summary cannot be written ({getattr(error, 'strerror', None) or error})"
    try:
        written = json.loads(target.read_text())
        done, ended = int(written["steps"]), str(written["status"])
    except (OSError, ValueError, KeyError, TypeError):
        done, ended = 0, status
    if ended == "finished" and (steps is None or done >= steps):  # else it was to be resumed, to more steps
        return f"finished before that, and its files in {directory} are complete"
    return stopped(directory, done, steps)


def finish_killed(directory: Path, status: str, steps: int | None) -> str:
    """Does what :func:`finish` does; the phrase also says what to do, as the cause is not in the run itself."""
    message = finish(directory, status, steps)
    again = status == "failed" and message.startswith("stopped") and not _saved(directory)
    return f"{message}; run it again" if again else message


def stopped(directory: Path, done: int, steps: int | None) -> str:
    """Returns the number of steps made, and how to draw the timeline, in words."""
    after = counted(done, "step") if steps is None else f"{done} of {counted(steps, 'step')}"
    draw = f"'dataflow timeline {directory} -o {directory}.html' draws what it did"
    saved = _saved(directory)
    resume = f"'dataflow resume {directory}' resumes from step {saved[-1]}, " if saved else ""
    return f"stopped after {after}; {resume}{draw if done else f'its files are in {directory}'}"


def _saved(directory: Path) -> list[int]:
    return CheckpointStore(directory / "checkpoints").whole()


def total_so_far(directory: Path, trace: Trace) -> float:
    """Returns the seconds that a run's processes took so far, without the time between them.

    Args:
        directory: of the run; its summary has the exact number, unless the last process was killed with its supervisor.
        trace: of the run, which shows it from the first task on.
    """
    try:
        return float(written_by(directory)["total_s"])
    except (ValueError, KeyError, TypeError):
        return _processes_s(trace)


def written_by(directory: Path) -> dict[str, Any]:
    """Returns the summary that the last process of a run wrote; empty if there is none that can be read."""
    try:
        return dict(json.loads((directory / "summary.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _processes_s(trace: Trace) -> float:
    begin = trace.downtimes[-1].end if trace.downtimes else 0.0
    return float(trace.meta.get(EARLIER, 0.0)) + max(0.0, trace.end - begin)


def complete(directory: Path, steps: int) -> dict[str, Any] | None:
    """Returns the summary of a run that has finished, with at least that many steps; None of any other.

    A run that was killed after its last checkpoint, but before its summary, is not complete: its weights have not been
    evaluated, exported and digested.
    """
    summary = written_by(directory)
    try:
        return summary if summary["status"] == "finished" and summary["steps"] >= steps else None
    except (KeyError, TypeError):
        return None


def summarise(
    trace: Trace,
    steps: int,
    evaluations: Mapping[int, float],
    accurate: bool,
    rewards: Mapping[str, Any],
    total_s: float | None,
    digest: str | None = None,
) -> dict[str, Any]:
    """Returns the content of summary.json.

    Args:
        trace: of the run; its meta has the policy, the seed and the status.
        steps: number of steps made.
        evaluations: mean score by step; 0 is before training.
        accurate: whether the scores say what is right and what is wrong, so that the mean is an accuracy.
        rewards: counts of the requests.
        total_s: seconds that the run's processes took.
        digest: of the weights.
    """
    from dataflow.timeline.causes import attribution

    numbers = attribution.summary(trace)
    after = [evaluations[step] for step in sorted(evaluations) if step > 0]
    last = after[-LAST_EVALUATIONS:]
    mean = "accuracy" if accurate else "score"
    found = {
        **{name: trace.meta.get(name) for name in _FACTS},
        **({"switches": switches} if (switches := trace.meta.get("switches")) else {}),
        "status": trace.meta.get("status"),
        "steps": steps,
        "seed": trace.meta.get("seed"),
        "total_s": total_s,
        **{name: numbers.get(name) for name in _FIGURES},
        f"{mean}_before": evaluations.get(0),
        f"{mean}_after": last[-1] if last else None,
        f"{mean}_mean_last_{LAST_EVALUATIONS}": sum(last) / len(last) if len(last) == LAST_EVALUATIONS else None,
        "evaluations": {str(step): evaluations[step] for step in sorted(evaluations)},
        "weights_sha256": digest,
        "rewards": dict(rewards),
    }
    return {name: value for name, value in found.items() if value or name not in _absent(trace)}


def _absent(trace: Trace) -> set[str]:
    """Returns the figures that do not apply to a pipeline, for want of stages with certain roles."""
    pipeline = (trace.meta.get("job") or {}).get("pipeline")
    if pipeline is None:
        return set()
    roles = {s["role"] for s in pipeline["stages"]}
    return {name for role, names in _FIGURES_OF.items() if role not in roles for name in names}


def _summary(directory: Path, status: str) -> dict[str, Any]:
    from dataflow.running.reporting.agent_totals import AgentTotals
    from dataflow.running.reporting.tracking import METRICS, evaluation_in, read_metrics
    from dataflow.system import clock
    from dataflow.timeline import perfetto
    from dataflow.timeline.spans import Trace

    traces = []
    for file in (EVALUATIONS, "trace.json"):
        try:
            traces.append(perfetto.read(directory / file))
        except DataflowError:
            traces.append(Trace())  # the run ended before its first event
    trace = traces[-1]
    trace.meta["status"] = status
    evaluations: dict[int, float] = {}
    accurate: dict[int, bool] = {}
    done, totals = 0, AgentTotals()
    for row in read_metrics(directory / METRICS):
        if (found := evaluation_in(row)) is not None:
            evaluations[row["step"]], accurate[row["step"]] = found
        totals.step(row)
        if "timing_s/step" in row:
            done = max(done, row["step"])
    totals.resumed({}, trace.meta.get(UNLOGGED, {}))
    config = directory / "config.yaml"
    if EARLIER in trace.meta:  # the configuration may be of the first process
        total_s: float | None = _processes_s(trace)
    else:
        total_s = clock.now() - config.stat().st_mtime if config.exists() else None
    return summarise(trace, done, evaluations, all(accurate.values()), totals.counts(traces), total_s)
