"""Progress of a run: a line a step, on a terminal above a bar; and the table at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

_SHOWN = {
    "critic/score/mean": "reward {:.2f}",
    "reward/latency_p95": "p95 {:.2f} s",
    "reward/failed": "{:.0f} failed",
    "reward/retried": "{:.0f} tried again",
    "overlap/exposed_wait_s": "exposed wait {:.2f} s",
    "staleness/max": "staleness {:.0f}",
}
"""Metrics of a step to print, in this order."""


class Progress:
    """Shows the progress of a run on rich's ``console``, stderr by default; ``quiet`` shows nothing.

    ``began`` is when the command began, in seconds of ``time.monotonic``; now if None.
    """

    def __init__(self, quiet: bool = False, console: Console | None = None, began: float | None = None) -> None:
        from rich.console import Console

        self._began = time.monotonic() if began is None else began
        self._console = console or Console(stderr=True, quiet=quiet, highlight=False)
        self._bar: Any = None
        self._task: TaskID | None = None
        self._making = False
        self._steps = 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self._began

    def warm_up(self, done: int, total: int) -> None:
        """Shows the tiny model's supervised warm-up, which happens once."""
        if not self._making:
            self._making = True
            self._console.print("making the tiny model: a short supervised warm-up, cached for later runs")
            self._show("warm-up", total)
        self._move(done)
        if done >= total:
            self.stop()

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
        self._show("training", steps)

    def evaluation(self, step: int, value: float, accurate: bool) -> None:
        """Call when the evaluation of a step ends (0: before training); later steps may have ended before."""
        when = f"of step {step}" if step else "before training"
        self._console.print(f"evaluation {when}: {'accuracy' if accurate else 'score'} {value:.3f}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call when the training of a step ends."""
        found = {name: metrics[name] for name in _SHOWN if name in metrics}
        uncounted = ("reward/failed", "reward/retried")  # if they are 0
        shown = [_SHOWN[name].format(of) for name, of in found.items() if of > 0 or name not in uncounted]
        self._console.print(f"step {step}/{self._steps}  {'  '.join(shown)}", soft_wrap=True)
        self._move(step)

    def stop(self) -> None:
        """Call when training ends, whether it succeeded or not."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show(self, what: str, total: int) -> None:
        if self._console.is_terminal and not self._console.quiet:
            from rich import progress

            self._bar = progress.Progress(
                progress.TextColumn(what),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total)
            self._bar.start()

    def _move(self, done: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done)


def end_table(summary: dict[str, Any]) -> str:
    """Returns the results of a run, the content of its summary.json, as a table of two columns."""
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
    longest = list(summary["exposed_wait_by_cause"].items())[:3]
    causes = [f"{name} {seconds:.1f} s" for name, seconds in longest if seconds >= 0.05]
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
