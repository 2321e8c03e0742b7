"""The summary of a run: what summary.json holds."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataflow.timeline.spans import Trace

SUMMARY = "summary.json"
LAST_EVALUATIONS = 3
"""Number of last evaluations whose mean the summary has, as single ones swing by several points."""
_FACTS = ("policy", "split", "max_staleness", "order")
_FIGURES = ("wall_s", "resumed", "not_running_s", "step_s", "after_training_s", "gpu_busy_s", "exposed_wait_s",
            "exposed_wait_by_cause", "reward_service_s", "lower_bound_s")  # fmt: skip


def read_summary(directory: Path) -> dict[str, Any]:
    """Returns the summary that the last process of a run wrote; empty if there is none that can be read."""
    try:
        return dict(json.loads((directory / SUMMARY).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def complete(directory: Path, steps: int) -> dict[str, Any] | None:
    """Returns the summary of a run that has finished, with at least that many steps; None of any other.

    A run that was killed after its last checkpoint, but before its summary, is not complete: its weights have not been
    evaluated, exported and digested.
    """
    summary = read_summary(directory)
    return summary if summary.get("status") == "finished" and summary.get("steps", 0) >= steps else None


def evaluation_in(metrics: Mapping[str, float | None]) -> tuple[float, bool] | None:
    """Returns the mean score of an evaluation, and whether it is an accuracy; None of a row without an evaluation.

    Stages of a user's own may log ``val-core/*`` alone, each of which counts alike then.
    """
    scores = [value for name, value in metrics.items() if name.startswith("val-core/") and value is not None]
    if not scores:
        return None
    from dataflow.stages.validate import ACCURACY, SCORE

    mean = metrics.get(SCORE)
    return sum(scores) / len(scores) if mean is None else mean, metrics.get(ACCURACY) is not None


def summarise(
    trace: Trace,
    steps: int,
    evaluations: Mapping[int, float],
    accurate: bool,
    rewards: Mapping[str, Any],
    total_s: float,
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
    """
    from dataflow.timeline import causes

    numbers = causes.summary(trace)
    after = [evaluations[step] for step in sorted(evaluations) if step > 0]
    last = after[-LAST_EVALUATIONS:]
    mean = "accuracy" if accurate else "score"
    return {
        **{name: trace.meta.get(name) for name in _FACTS},
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


LOGGED = re.compile(r"reward/(?:(?P<agent>[^/]+)/)?(?P<name>tokens|hedged)")
"""Metrics of a row that the counts of requests need; without an agent they are those of the main one."""
_COUNTS = ("requested", "scored", "failed", "cancelled", "retried", "hedged", "cached", "shared", "tokens")


def reward_counts(traces: Sequence[Trace], logged: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """Returns the ``rewards`` of a run's summary; {} if it requested none.

    Each submitted request is scored, failed or cancelled; ``cancelled`` includes requests whose reward was not
    collected because the run ended or was interrupted. Counts of several agents are summed, with those of each in
    ``agents``.

    Args:
        traces: of the run, and of evaluations outside its clock, which say how each request ended.
        logged: sums of :data:`LOGGED` by agent, "" for the main one, and name.
    """
    from dataflow.timeline.agents import MAIN, agents_of, part_of

    each = {}
    for agent in dict.fromkeys(agent for trace in traces for agent in agents_of(trace)):
        parts = [part_of(trace, agent) for trace in traces]
        marks = [[mark.args for mark in part.marks if mark.name == "reward"] for part in parts]
        spans = [sum(int(span.args.get("requests", 0)) for span in part.spans) for part in parts]
        ended = [args for of in marks for args in of]
        how = Counter(args.get("how", "") for args in ended)
        sent = sum(max(len(of), requests) for of, requests in zip(marks, spans, strict=True))
        scored = len(ended) - how["failed"] - how["cancelled"]
        if sent:
            each[agent] = {
                "requested": sent,
                "scored": scored,
                "failed": how["failed"],
                "cancelled": sent - scored - how["failed"],
                "retried": sum(max(0, args.get("tries", 1) - 1) for args in ended),
                "hedged": logged.get(("" if agent == MAIN else agent, "hedged"), 0),
                "cached": how["ledger"],
                "shared": how["shared"],
                "tokens": logged.get(("" if agent == MAIN else agent, "tokens"), 0),
                "latency_s": _latency(parts),
            }
    if len(each) < 2:
        return next(iter(each.values()), {})
    sums = {name: sum(counts[name] for counts in each.values()) for name in _COUNTS}
    return {**sums, "latency_s": _latency(traces), "agents": each}


def _latency(traces: Iterable[Trace]) -> dict[str, float | None]:
    """Returns the quantiles of the durations of the requests that were answered by a call, in seconds."""
    from dataflow.rewards.steps import latency_summary
    from dataflow.timeline.spans import called

    called_s = array("d", (m.end - m.begin for t in traces for m in t.marks if m.name == "reward" and called(m.args)))
    found = latency_summary(called_s)
    return {name: found.get(name) for name in ("p50", "p95", "p99")}
