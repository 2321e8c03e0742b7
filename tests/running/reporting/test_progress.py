"""The progress of a run on a terminal, and in a file."""

from __future__ import annotations

import io

from rich.console import Console

from dataflow.running.reporting.progress import Progress

METRICS = {
    "critic/score/mean": 0.5,
    "overlap/exposed_wait_s": 1.25,
    "staleness/max": 1.0,
    "reward/latency_p95": 0.75,
    "reward/failed": 0.0,
    "reward/retried": 2.0,
}
LINES = (
    "evaluation before training: accuracy 0.250\n"
    "step 7/20  reward 0.50  p95 0.75 s  2 tried again  exposed wait 1.25 s  staleness 1\n"
    "evaluation of step 6: score 0.875\n"
)


def shown(terminal: bool, quiet: bool = False) -> str:
    file = io.StringIO()
    progress = Progress(console=Console(file=file, force_terminal=terminal, width=100, quiet=quiet, highlight=False))
    for done in (1, 10):
        progress.warm_up(done, 10)
    progress.start(20)
    progress.evaluation(0, 0.25, True)
    progress.step(7, METRICS)
    progress.evaluation(6, 0.875, False)
    progress.stop()
    progress.stop()
    return file.getvalue()


def test_a_step_is_a_line_and_on_a_terminal_a_bar_moves() -> None:
    said = "making the tiny model: a short supervised warm-up, cached for later runs\n"
    assert shown(terminal=False) == said + LINES
    screen = shown(terminal=True)
    for words in ("warm-up", "10/10", "training", "7/20", "reward 0.50", "accuracy", "\x1b[?25h"):
        assert words in screen, words
    assert shown(terminal=True, quiet=True) == ""
