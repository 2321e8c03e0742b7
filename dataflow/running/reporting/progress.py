"""Progress of a run: a moving picture on a terminal, elsewhere one plain line per step; and the table at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflow.running.reporting.live import facts, picture, recent
from dataflow.timeline.spans import Span, Trace

if TYPE_CHECKING:
    from rich.console import Console

# Metrics of a step to print, in this order: with the moving picture, and without it.
_SHORT = {"critic/score/mean": "reward {:.2f}"}
_LONG = {
    "reward/latency_p95": "p95 {:.2f} s",
    "reward/failed": "{:.0f} failed",
    "reward/retried": "{:.0f} tried again",
    "overlap/exposed_wait_s": "exposed wait {:.2f} s",
    "staleness/max": "staleness {:.0f}",
}
_COUNTS = ("reward/failed", "reward/retried")


def _worth(name: str, metrics: Mapping[str, float]) -> bool:
    return name in metrics and (name not in _COUNTS or metrics[name] > 0)


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

    def warm_up(self, done: int, total: int) -> None:
        """Shows the tiny model's supervised warm-up, which happens once."""
        if self._warm is None:
            self._console.print("making the tiny model: a short supervised warm-up, cached for later runs")
            if self._console.is_terminal:
                self._warm = self._make_bar("warm-up")
                self._warm.start()
                self._task = self._warm.add_task("", total=total, facts="")
            else:
                self._warm = False
        if self._warm:
            self._warm.update(self._task, completed=done)
            if done >= total:
                self._warm.stop()

    def _make_bar(self, what: str) -> Any:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
        from rich.progress import Progress as Bar

        columns = (
            TextColumn(what),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
        )
        return Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)

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
            self._console.print(f"  {time.monotonic() - self._began:.1f} s: {what}")

    @property
    def moves(self) -> bool:
        """Whether the console is a terminal that can show a moving picture."""
        return bool(self._console.is_terminal and not self._console.quiet)

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
            trace, running, most: see :func:`dataflow.running.reporting.live.recent`.
            stats: of each reward agent, by its name.
        """
        if self._live is None:
            return
        from rich.console import Group
        from rich.text import Text

        shown = recent(trace, running, most)
        if shown.spans:
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

    def _facts(self) -> str:
        return "  ".join(filter(None, (self._line(self._metrics, _SHORT), self._evaluated)))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call when the training of a step ends."""
        self._metrics = metrics
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=self._facts())
        else:
            self._console.print(f"step {step}/{self._steps}  {self._line(metrics, _SHORT | _LONG)}", soft_wrap=True)

    def _line(self, metrics: Mapping[str, float], formats: Mapping[str, str]) -> str:
        # Counts of 0 are left out.
        return "  ".join(text.format(metrics[name]) for name, text in formats.items() if _worth(name, metrics))

    def stop(self) -> None:
        """Call when training ends, whether it succeeded or not."""
        if self._live is not None:
            self._live.stop()
            self._live = self._bar = None


def end_table(summary: dict[str, Any]) -> str:
    """Returns the results of a run, as a table of two columns.

    Args:
        summary: the content of its summary.json.
    """
    from dataflow.timeline.page.panel import evaluated_in
    from dataflow.timeline.text import table

    wall = summary["wall_s"]
    rows = [("policy", summary["policy"]), ("steps", str(summary["steps"]))]
    mean, evaluated = evaluated_in(summary)
    if evaluated["before"] is not None:
        rows.append((f"{mean} before", f"{evaluated['before']:.3f}"))
    if evaluated["after"] is not None:
        rows.append((f"{mean} after", f"{evaluated['after']:.3f} (evaluation of step {_last_of(summary)})"))
    if evaluated["mean_last_3"] is not None:
        rows.append(("", f"{evaluated['mean_last_3']:.3f} (mean of the last 3 evaluations)"))
    rows += [
        ("time in all", f"{summary['total_s']:.1f} s (with start, evaluations and end)"),
        ("training", f"{wall:.1f} s" + (f" ({summary['step_s']:.2f} s a step)" if summary["step_s"] else "")),
        ("GPU pool busy", f"{summary['gpu_busy_s'] / wall:.0%}" if wall else "-"),
        ("exposed wait", f"{summary['exposed_wait_s']:.1f} s" + _causes(summary["exposed_wait_by_cause"])),
    ]
    if summary["after_training_s"] >= 0.05:
        idle = f"GPU pool idle {summary['after_training_idle_s']:.1f} s of it"
        rows.append(("after training", f"{summary['after_training_s']:.1f} s until the last task ended, {idle}"))
    if rewards := summary.get("rewards"):
        agents = rewards.get("agents") or {"": rewards}
        rows += [(f"rewards {agent}".rstrip(), _rewards(counts)) for agent, counts in agents.items()]
    return str(table(rows))


def _last_of(summary: dict[str, Any]) -> int:
    """Returns the step of the last evaluation."""
    return max(map(int, summary["evaluations"]))


def _causes(by_cause: dict[str, float]) -> str:
    worst = [f"{name} {seconds:.1f} s" for name, seconds in list(by_cause.items())[:3] if seconds >= 0.05]
    return f" ({', '.join(worst)})" if worst else ""


def _rewards(counts: dict[str, Any]) -> str:
    parts = [f"{counts['scored']} of {counts['requested']} scored"]
    names = {"failed": "failed", "cancelled": "cancelled", "retried": "tried again", "cached": "from the ledger"}
    parts += [f"{counts[name]} {text}" for name, text in names.items() if counts.get(name)]
    return ", ".join(parts)
