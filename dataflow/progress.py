"""Progress on the terminal: a moving bar on a tty, a plain line a step elsewhere; and the table at the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from dataflow.timeline.spans import Span


class Progress:
    """Shows what a run does; quiet shows nothing."""

    def __init__(self, quiet: bool = False) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, quiet=quiet, highlight=False)
        self._bar: Any = None
        self._task: Any = None
        self._warm: Any = None
        self._steps = 0
        self._accuracy: float | None = None

    def warm_up(self, done: int, total: int) -> None:
        """Shows the tiny model's supervised warm-up, which happens once."""
        if self._warm is None:
            self._console.print("making the tiny model: a short supervised warm-up, cached for later runs")
            if self._console.is_terminal:
                self._warm = self._make_bar("warm-up")
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
        bar = Bar(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
        bar.start()
        return bar

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Shows what goes on before and after training."""
        if self._console.is_terminal:
            with self._console.status(what):
                yield
        else:
            self._console.print(what)
            yield

    def start(self, steps: int) -> None:
        """Training starts."""
        self._steps = steps
        if self._console.is_terminal:
            self._bar = self._make_bar("training")
            self._task = self._bar.add_task("", total=steps, facts="")

    def span(self, span: Span) -> None:
        """A task ended."""
        if self._bar is not None:
            self._bar.refresh()

    def accuracy(self, value: float) -> None:
        """An evaluation ended."""
        self._accuracy = value

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step's training ended."""
        facts = self._facts(metrics)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=facts)
        else:
            self._console.print(f"step {step}/{self._steps}  {facts}")

    def _facts(self, metrics: Mapping[str, float]) -> str:
        facts = []
        if "critic/score/mean" in metrics:
            facts.append(f"reward {metrics['critic/score/mean']:.2f}")
        if self._accuracy is not None:
            facts.append(f"accuracy {self._accuracy:.2f}")
        if "overlap/exposed_wait_s" in metrics:
            facts.append(f"exposed wait {metrics['overlap/exposed_wait_s']:.2f} s")
        if "staleness/max" in metrics:
            facts.append(f"staleness {metrics['staleness/max']:.0f}")
        return "  ".join(facts)

    def stop(self) -> None:
        """Training is over, well or not."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def end_table(summary: dict[str, Any]) -> str:
    """Returns what a run came to, as a table of two columns.

    Args:
        summary: what its summary.json holds.
    """
    from dataflow.timeline.text import table

    wall = summary["wall_s"]
    rows = [("policy", summary["policy"]), ("steps", str(summary["steps"]))]
    if summary["accuracy_before"] is not None and summary["accuracy_after"] is not None:
        rows += [
            ("accuracy before", f"{summary['accuracy_before']:.3f}"),
            ("accuracy after", f"{summary['accuracy_after']:.3f} (mean of the last evaluations)"),
        ]
    rows += [
        ("wall time", f"{wall:.1f} s ({summary['step_s']:.2f} s a step)"),
        ("GPU pool busy", f"{summary['gpu_busy_s'] / wall:.0%}" if wall else "-"),
        ("exposed wait", f"{summary['exposed_wait_s']:.1f} s" + _causes(summary["exposed_wait_by_cause"])),
    ]
    if summary["rewards"]:
        rows.append(("rewards", _rewards(summary["rewards"])))
    return str(table(rows))


def _causes(by_cause: dict[str, float]) -> str:
    worst = [f"{name} {seconds:.1f} s" for name, seconds in list(by_cause.items())[:3] if seconds >= 0.05]
    return f" ({', '.join(worst)})" if worst else ""


def _rewards(counts: dict[str, Any]) -> str:
    told = [f"{counts['scored']} of {counts['requested']} scored"]
    names = {"failed": "failed", "cancelled": "cancelled", "retried": "tried again", "cached": "from the ledger"}
    told += [f"{counts[name]} {text}" for name, text in names.items() if counts.get(name)]
    return ", ".join(told)
