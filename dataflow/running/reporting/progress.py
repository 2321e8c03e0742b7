"""Progress of a run: on a terminal a moving Gantt of its last steps, elsewhere a line a step; the table at the end."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflow.drawing.style import colours
from dataflow.timeline.spans import Span, Trace, looks
from dataflow.timeline.text import chart

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_SHORT = {"critic/score/mean": "reward {:.2f}"}
_LONG = {
    **_SHORT,
    "reward/latency_p95": "p95 {:.2f} s",
    "reward/failed": "{:.0f} failed",
    "reward/retried": "{:.0f} tried again",
    "overlap/exposed_wait_s": "exposed wait {:.2f} s",
    "staleness/max": "staleness {:.0f}",
}
"""Metrics of a step to print, in this order: beside the moving picture, and without it."""
_COUNTS = {"failed": "failed", "retried": "tried again", "timed_out": "timed out", "throttled": "throttled"}
"""Counts of an agent that are shown if they are not 0."""
_STEPS = 3
"""Steps in the picture: the newest, and those it overlaps with."""
_MARKS = 20_000
"""Number of newest requests to read: enough for some steps of any run, few enough to draw twice per second."""
_PIECES = re.compile(r"[^\W\d_][\d.=]*|~+|[^~\w]+|.")
"""Matches a bar (a letter, then digits, dots and dashes), a wait, or anything else."""


class Progress:
    """Shows the progress of a run.

    Args:
        quiet: whether to show nothing.
        console: rich's console to print to; stderr by default.
        began: when the command began, in seconds of ``time.monotonic``; now if None.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None, began: float | None = None) -> None:
        from rich.console import Console

        self._began = time.monotonic() if began is None else began
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._bar: Any = None
        self._live: Any = None
        self._metrics: Mapping[str, float] = {}
        self._task: Any = None
        self._warm: Any = None
        self._steps = 0
        self._evaluated = ""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._began

    @property
    def moves(self) -> bool:
        """Whether the console is a terminal that can show a moving picture."""
        return bool(self._console.is_terminal and not self._console.quiet)

    def warm_up(self, done: int, total: int) -> None:
        """Shows the tiny model's supervised warm-up, which happens once."""
        if self._warm is None:
            self._console.print("making the tiny model: a short supervised warm-up, cached for later runs")
            self._warm = self._make_bar("warm-up") if self._console.is_terminal else False
            if self._warm:
                self._warm.start()
                self._task = self._warm.add_task("", total=total, facts="")
        if self._warm:
            self._warm.update(self._task, completed=done)
            if done >= total:
                self._warm.stop()

    def _make_bar(self, what: str) -> Any:
        from rich import progress

        return progress.Progress(
            progress.TextColumn(what),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[facts]}"),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            console=self._console,
        )

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Shows a phase before or after training."""
        if self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            self._console.print(what)
            yield

    def reached(self, what: str) -> None:
        """Prints what of the start is done, and how many seconds after the command began."""
        if self._console.is_terminal:  # elsewhere a line per step is enough
            self._console.print(f"  {self.elapsed_s:.1f} s: {what}")

    def start(self, steps: int) -> None:
        """Call when training starts."""
        self._steps = steps
        if self.moves:
            from rich.live import Live

            self._bar = self._make_bar("training")
            self._task = self._bar.add_task("", total=steps, facts=self._facts())
            self._live = Live(self._bar, console=self._console)
            self._live.start()

    def show(self, trace: Trace, running: Sequence[Span], stats: Mapping[str, Any], most: int) -> None:
        """Redraws the picture.

        Args:
            trace: of the run so far.
            running: tasks that have not ended, as spans until now.
            stats: of each reward agent, by its name.
            most: maximum number of finished tasks to look at, which suffice for a picture of a long run.
        """
        if self._live is None:
            return
        from rich.console import Group
        from rich.text import Text

        spans = [*trace.spans[-most:], *running]
        begin = min((s.begin for s in spans), default=0.0)
        shown = Trace(spans, [m for m in trace.marks[-_MARKS:] if m.end > begin], meta=trace.meta)
        if spans:
            line = Text(facts(stats, self._metrics), no_wrap=True, overflow="ellipsis")
            self._live.update(Group(self._bar, picture(shown, self._console.width), line))

    def evaluation(self, step: int, value: float, accurate: bool) -> None:
        """Call when the evaluation of a step ends (0: before training); later steps may have ended before."""
        mean = f"{'accuracy' if accurate else 'score'} {value:.3f}"
        self._evaluated = f"{mean} ({f'step {step}' if step else 'before'})"
        if self._bar is not None:
            self._bar.update(self._task, facts=self._facts())
        elif not self._console.is_terminal:
            self._console.print(f"evaluation {f'of step {step}' if step else 'before training'}: {mean}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call when the training of a step ends."""
        self._metrics = metrics
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=self._facts())
        else:
            self._console.print(f"step {step}/{self._steps}  {_line(metrics, _LONG)}", soft_wrap=True)

    def _facts(self) -> str:
        return "  ".join(filter(None, (_line(self._metrics, _SHORT), self._evaluated)))

    def stop(self) -> None:
        """Call when training ends, whether it succeeded or not."""
        if self._live is not None:
            self._live.stop()
            self._live = self._bar = None


def _line(metrics: Mapping[str, float], formats: Mapping[str, str]) -> str:
    uncounted = ("reward/failed", "reward/retried")  # if they are 0
    found = {name: metrics[name] for name in formats if name in metrics}
    return "  ".join(formats[name].format(of) for name, of in found.items() if of > 0 or name not in uncounted)


def picture(trace: Trace, width: int) -> Text:
    """Returns the Gantt of a trace's last steps in colour: a row for each lane of each resource, and one of rewards."""
    from rich.text import Text

    newest = max(s.step for s in trace.spans)
    drawn = chart(trace, width, (newest - _STEPS + 1, newest))
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
        limit = of.get("limit")
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


def end_table(summary: dict[str, Any]) -> str:
    """Returns the results of a run, as a table of two columns.

    Args:
        summary: the content of its summary.json.
    """
    from dataflow.timeline.compare import evaluated_in
    from dataflow.timeline.text import table

    wall = summary["wall_s"]
    rows = [("policy", summary["policy"]), ("steps", str(summary["steps"]))]
    mean, evaluated = evaluated_in(summary)
    if evaluated["before"] is not None:
        rows.append((f"{mean} before", f"{evaluated['before']:.3f}"))
    if evaluated["after"] is not None:
        last = max(map(int, summary["evaluations"]))
        rows.append((f"{mean} after", f"{evaluated['after']:.3f} (evaluation of step {last})"))
    if evaluated["mean_last_3"] is not None:
        rows.append(("", f"{evaluated['mean_last_3']:.3f} (mean of the last 3 evaluations)"))
    causes = [f"{name} {seconds:.1f} s" for name, seconds in summary["exposed_wait_by_cause"].items()]
    causes = [cause for cause in causes[:3] if not cause.endswith(" 0.0 s")]
    rows += [
        ("time in all", f"{summary['total_s']:.1f} s (from the command to the end of its services)"),
        ("training", f"{wall:.1f} s" + (f" ({summary['step_s']:.2f} s a step)" if summary["step_s"] else "")),
        ("GPU pool busy", f"{summary['gpu_busy_s'] / wall:.0%}" if wall else "-"),
        ("exposed wait", f"{summary['exposed_wait_s']:.1f} s" + (f" ({', '.join(causes)})" if causes else "")),
    ]
    if summary["after_training_s"] >= 0.05:
        rows.append(("after training", f"{summary['after_training_s']:.1f} s until the last task ended"))
    words = {"failed": "failed", "cancelled": "cancelled", "retried": "tried again", "cached": "from the ledger"}
    rewards = summary.get("rewards") or {}
    for agent, counts in (rewards.get("agents") or ({"": rewards} if rewards else {})).items():
        parts = [f"{counts['scored']} of {counts['requested']} scored"]
        parts += [f"{counts[name]} {text}" for name, text in words.items() if counts.get(name)]
        rows.append((f"rewards {agent}".rstrip(), ", ".join(parts)))
    return str(table(rows))
