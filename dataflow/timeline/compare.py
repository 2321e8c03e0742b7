"""`dataflow compare`: several runs as one table, one page or one picture."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from dataflow.errors import ConfigError, DataError
from dataflow.files import decoded
from dataflow.policy import PRESETS, STREAM
from dataflow.timeline import files
from dataflow.timeline.causes import attribution
from dataflow.timeline.page.panel import BOUNDS, EVALUATED, differ, evaluated_in, mean_of
from dataflow.timeline.spans import Trace
from dataflow.timeline.text import table

Load = Callable[[str], Trace]
_EVALUATED = tuple(f"{mean}_{when}" for mean in ("accuracy", "score") for when in EVALUATED)
_SHOWN = {"total_s", "lower_bound_s", *_EVALUATED}
"""Keys of a summary that tables and pages show."""
_HEAD = (
    "policy",
    "steps",
    "wall s",
    "in all s",
    "s/step",
    "change",
    "GPU busy",
    "exposed wait s",
    "lower bound s",
)


def compare(runs: Sequence[str], load: Load, out: str | None, as_json: bool) -> str:
    """Returns the table of several runs in the order of the policies, compared with the first of them.

    Args:
        runs: their directories.
        load: reads a run's trace.
        out: a picture or page to write.
        as_json: whether to return the table as JSON.

    Raises:
        UserError: a run does not exist or is given twice, or the file cannot be drawn.
    """
    files.check(out)
    traces: dict[str, Trace] = {}
    rows: list[dict[str, Any]] = []
    places = [Path(run).resolve() for run in runs]
    for at, place in enumerate(places):
        if place in places[:at]:
            raise ConfigError(f"run '{runs[at]}' is given twice; give different runs.")
    loaded = [(run, load(run)) for run in runs]
    for run, trace in sorted(loaded, key=lambda each: _place(each[1])):
        names = (str(trace.meta.get("policy") or Path(run).name), Path(run).name, str(run))
        name = next(name for name in names if name not in traces)
        traces[name] = trace
        rows.append(_row(run, name, trace, next((row["step_s"] for row in rows if row["step_s"]), None)))
    if out:
        files.draw(traces, out, facts={row["policy"]: row for row in rows})
    if as_json:
        return json.dumps(rows, indent=1)
    mean = [mean_of(rows)] if any(evaluated_in(row)[1]["after"] is not None for row in rows) else []
    lines: list[Sequence[str]] = [(*_HEAD, *mean)]
    for row in rows:
        bound = row["lower_bound_s"]
        lines.append(
            (
                row["policy"],
                str(row["steps"]),
                f"{row['wall_s']:.1f}",
                "-" if row["total_s"] is None else f"{row['total_s']:.1f}",
                "-" if row["step_s"] is None else f"{row['step_s']:.2f}",
                "-" if row["change"] is None else f"{row['change']:+.1%}",
                f"{row['gpu_busy']:.0%}",
                f"{row['exposed_wait_s']:.1f}",
                "-" if bound is None else f"{bound:.1f}",
                *([_evaluated(row)] if mean else []),
            )
        )
    return table(lines) + "".join(_notes(rows)) + written(out)


def _place(trace: Trace) -> int:
    """Returns the place of a run's policy in the order of the presets; others come last."""
    name = str(trace.meta.get("policy", "")).removesuffix(STREAM)
    return PRESETS.index(name) if name in PRESETS else len(PRESETS)


def _notes(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yields which run is the fastest, and why lower bounds differ."""
    whole = [row for row in rows if row["step_s"] is not None]  # a run that was cut off may have no whole step
    if len(whole) > 1:
        best = min(whole, key=lambda row: float(row["step_s"]))
        change = f", {best['change']:+.1%} against {whole[0]['policy']}" if best is not whole[0] else ""
        yield f"\n\nfastest: {best['policy']}{change}"
    if differ([row["lower_bound_s"] for row in rows if row["lower_bound_s"]]):
        yield f"\n{BOUNDS[0].lower()}{BOUNDS[1:]}"


def _evaluated(row: dict[str, Any]) -> str:
    before, after, mean = evaluated_in(row)[1].values()
    if after is None:
        return "-"
    text = f"{after:.2f}" if before is None else f"{before:.2f} -> {after:.2f}"
    return text if mean is None else f"{text} (mean of the last 3: {mean:.2f})"


def _row(run: str, name: str, trace: Trace, first_s: float | None) -> dict[str, Any]:
    numbers, known = attribution.summary(trace), summary_of(run)
    wall, step_s = numbers["wall_s"], numbers["step_s"] or None
    return {
        "run": str(run),
        "policy": name,
        "steps": trace.steps,
        "wall_s": wall,
        "total_s": known.get("total_s"),
        "step_s": step_s,
        # Per step, as runs may differ in their number of steps: one may have been interrupted.
        "change": None if step_s is None else step_s / first_s - 1 if first_s else 0.0,
        "gpu_busy": numbers["gpu_busy_s"] / wall if wall else 0.0,
        "exposed_wait_s": numbers["exposed_wait_s"],
        "lower_bound_s": known.get("lower_bound_s", numbers.get("lower_bound_s")),
        **{name: known.get(name) for name in _EVALUATED},
    }


def written(out: str | None) -> str:
    """Returns the line that names the picture or page just written, or "" if there is none."""
    if not out:
        return ""
    return f"\n\n{'page' if out.lower().endswith('.html') else 'picture'}: {out}"


def summary_of(run: str) -> dict[str, Any]:
    """Returns the content of a run's summary.json; {} if there is none.

    Raises:
        DataError: it is not a JSON object, or a figure in it is not a finite number.
    """
    path = Path(run)
    path = (path if path.is_dir() else path.parent) / "summary.json"
    if not path.is_file():
        return {}
    try:
        known = json.loads(decoded(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a JSON object: {error}; the run may have been cut off.") from error
    if not isinstance(known, dict):
        raise DataError(f"{path} is not a JSON object; the run may have been cut off.")
    for name in _SHOWN & known.keys():
        if known[name] is not None and not _is_finite(known[name]):
            raise DataError(f"{path}: {name} is not a finite number; remove the file, or run the pipeline again.")
    return known


def facts_of(run: str, out: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns what a page of one run says besides its trace: its summary, and ``samples``, the link to their page.

    Args:
        run: its directory, or its trace.
        out: the page, which the link starts from. Without a page of samples in the run's directory there is no link.
    """
    path = Path(run)
    samples = (path if path.is_dir() else path.parent) / "samples.html"
    facts = {name: value for name, value in summary_of(run).items() if name != "samples"}
    if samples.is_file():
        facts["samples"] = quote(Path(os.path.relpath(samples.resolve(), Path(out).resolve().parent)).as_posix())
    return facts


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
