"""Several runs as one table, in the terminal and on a page, and what a run's summary says besides its trace."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dataflow.errors import DataError
from dataflow.files import decoded
from dataflow.timeline.causes import summary
from dataflow.timeline.spans import Trace

Facts = Mapping[str, Mapping[str, Any]]
"""Run -> what its trace does not contain: its summary, and ``samples``, the address of the page of its samples."""
EVALUATED = ("before", "after", "mean_last_3")
"""Figures of evaluations in a summary, behind ``accuracy_`` or, where it is none, ``score_``."""
_KEYS = [f"{mean}_{when}" for mean in ("accuracy", "score") for when in EVALUATED]


def compared(traces: Mapping[str, Trace], facts: Facts) -> list[dict[str, Any]]:
    """Returns a row for each run, JSON-able; ``change`` is of the time a step, against the first run that has one."""
    rows: list[dict[str, Any]] = []
    for name, trace in traces.items():
        numbers, known = summary(trace), facts.get(name, {})
        wall, step_s = numbers["wall_s"], numbers["step_s"] or None
        first = next((row["step_s"] for row in rows if row["step_s"]), step_s)
        rows.append({
            "policy": name,
            "steps": trace.steps,
            "wall_s": wall,
            "total_s": known.get("total_s"),
            "step_s": step_s,
            # Per step, as runs may differ in their number of steps: one may have been interrupted.
            "change": step_s / first - 1 if step_s else None,
            "gpu_busy": numbers["gpu_busy_s"] / wall if wall else 0.0,
            "exposed_wait_s": numbers["exposed_wait_s"],
            "lower_bound_s": known.get("lower_bound_s", numbers.get("lower_bound_s")),
            **{key: known.get(key) for key in _KEYS},
        })  # fmt: skip
    return rows


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Returns the rows of :func:`compared` as texts, below those of the head."""
    means = [evaluated_in(row)[0] for row in rows]
    mean = ["score" if "score" in means else "accuracy"] if any(map(evaluated, rows)) else []
    head = ["policy", "steps", "wall s", "in all s", "s/step", "change", "GPU busy", "exposed wait s", "lower bound s"]
    return [[*head, *mean]] + [
        [
            row["policy"],
            str(row["steps"]),
            f"{row['wall_s']:.1f}",
            _shown(row["total_s"], ".1f"),
            _shown(row["step_s"], ".2f"),
            _shown(row["change"], "+.1%"),
            f"{row['gpu_busy']:.0%}",
            f"{row['exposed_wait_s']:.1f}",
            _shown(row["lower_bound_s"], ".1f"),
            *([evaluated(row) or "-"] if mean else []),
        ]
        for row in rows
    ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def fastest(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Returns the row with the least time a step; None unless several have a whole step."""
    whole = [row for row in rows if row["step_s"]]
    return min(whole, key=lambda row: float(row["step_s"])) if len(whole) > 1 else None


def note(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns which run is the fastest; "" unless several have a whole step."""
    if (best := fastest(rows)) is None:
        return ""
    first = next(row for row in rows if row["step_s"])
    against = "" if best is first else f", {best['change']:+.1%} against {first['policy']}"
    return f"fastest: {best['policy']}{against}"


def evaluated_in(facts: Mapping[str, Any]) -> tuple[str, dict[str, float | None]]:
    """Returns what the mean of an evaluation is, ``accuracy`` or ``score``, and its figures of a summary."""
    mean = "score" if any(facts.get(f"score_{when}") is not None for when in EVALUATED) else "accuracy"
    return mean, {when: facts.get(f"{mean}_{when}") for when in EVALUATED}


def evaluated(facts: Mapping[str, Any]) -> str:
    """Returns the figures of a summary's evaluations in words; "" without any."""
    before, after, mean = evaluated_in(facts)[1].values()
    if after is None:
        return ""
    text = f"{after:.2f}" if before is None else f"{before:.2f} -> {after:.2f}"
    return text if mean is None else f"{text} (mean of the last 3: {mean:.2f})"


def summary_of(run: str) -> dict[str, Any]:
    """Returns the content of a run's summary.json; {} if there is none."""
    path = Path(run)
    path = (path if path.is_dir() else path.parent) / "summary.json"
    if not path.is_file():
        return {}
    try:
        known = json.loads(decoded(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a JSON object: {error}; the run may have been cut off.") from error
    if not isinstance(known, dict):
        raise DataError(f"{path} is not a JSON object; the run may have been cut off.")
    return known


def facts_of(run: str, out: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what a page of one run says besides its trace: its summary, and ``samples``, the link to their page.

    The link starts from the page ``out``. Without a page of samples in the run's directory there is no link.
    """
    path = Path(run)
    samples = (path if path.is_dir() else path.parent) / "samples.html"
    facts = {name: value for name, value in summary_of(run).items() if name != "samples"}
    if samples.is_file():
        facts["samples"] = quote(Path(os.path.relpath(samples.resolve(), Path(out).resolve().parent)).as_posix())
    return facts
