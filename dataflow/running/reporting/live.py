"""The picture of a running run on a terminal: the last steps as a moving Gantt, and the rewards.

Only draws: its caller passes the finished and the running tasks and the reward agent's stats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflow.drawing.style import colours
from dataflow.timeline.spans import Span, Trace, looks
from dataflow.timeline.text import chart

if TYPE_CHECKING:
    from rich.text import Text

STEPS = 3
"""Steps to show: the newest, and those it overlaps with."""
_PIECES = re.compile(r"[^\W\d_][\d.=]*|~+|[^~\w]+|.")
"""Matches a bar (a letter, then digits, dots and dashes), a wait, or anything else."""
_MARKS = 20_000
"""Number of newest requests to read: enough for some steps of any run, few enough to draw twice per second."""


def recent(trace: Trace, running: Sequence[Span], most: int) -> Trace:
    """Returns the newest and the running tasks, which suffice for a picture of a long run.

    Args:
        trace: of the run so far.
        running: tasks that have not ended, as spans until now.
        most: maximum number of finished tasks.
    """
    spans = [*trace.spans[-most:], *running]
    begin = min((s.begin for s in spans), default=0.0)
    return Trace(spans, [m for m in trace.marks[-_MARKS:] if m.end > begin], meta=trace.meta)


def picture(trace: Trace, width: int) -> Text:
    """Returns the Gantt of a trace's last steps in colour: a row for each lane of each resource, and one of rewards."""
    from rich.text import Text

    newest = max(s.step for s in trace.spans)
    drawn = chart(trace, width, (newest - STEPS + 1, newest))
    colour = colours(*looks([trace]))
    look = {letter: f"white on {colour[stage]}" for stage, letter in drawn.letter.items()}
    left = max(len(name) for name, _ in drawn.rows) + 2
    text = Text(no_wrap=True, overflow="crop")
    for name, bars in drawn.rows:
        text.append(f"{name:<{left}}", "bold")
        for piece in _PIECES.findall(bars):
            text.append(piece, look.get(piece[0], "dim" if piece[0] == "~" else ""))
        text.append("\n")
    text.append(" " * left + drawn.axis, "dim")
    return text


def facts(stats: Mapping[str, Mapping[str, Any]], metrics: Mapping[str, float]) -> str:
    """Returns the current figures in one line.

    Args:
        stats: of each reward agent, by its name.
        metrics: of the last step.
    """
    parts = []
    for agent, of in stats.items():
        if not of:
            continue
        limit = sum((of.get("limit") or {}).values())
        name = "rewards" if len(stats) == 1 else agent
        parts.append(f"{name} in flight {of.get('running', 0)}" + (f" of {limit}" if limit else ""))
        parts.append(f"queued {of.get('waiting', 0)}")
        if (p95 := (of.get("latency_s") or {}).get("p95")) is not None and math.isfinite(p95):
            parts.append(f"p95 {p95:.2f} s")
        parts += [f"{of[name]} {word}" for name, word in _COUNTS.items() if of.get(name)]
    if "overlap/exposed_wait_s" in metrics:
        parts.append(f"exposed wait {metrics['overlap/exposed_wait_s']:.2f} s a step")
    if "staleness/max" in metrics:
        parts.append(f"staleness {metrics['staleness/max']:.0f}")
    return "  ".join(parts)


_COUNTS = {"failed": "failed", "retried": "tried again", "timed_out": "timed out", "throttled": "throttled"}
