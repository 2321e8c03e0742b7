"""The progress of a run on a terminal, and in a file."""

from __future__ import annotations

import io

from rich.console import Console

from dataflow.running.reporting.progress import Progress, facts
from dataflow.timeline.spans import Mark, Span, Trace

METRICS = {
    "critic/score/mean": 0.5,
    "overlap/exposed_wait_s": 1.25,
    "staleness/max": 1.0,
    "reward/latency_p95": 0.75,
    "reward/failed": 0.0,
    "reward/retried": 2.0,
}


def screen(terminal: bool) -> tuple[Progress, io.StringIO]:
    file = io.StringIO()
    # Off a terminal rich takes a line to be 80 wide.
    return Progress(console=Console(file=file, force_terminal=terminal, width=100 if terminal else 80)), file


def steps(count: int) -> Trace:
    trace = Trace(meta={"resources": {"gpu": 1, "reward": None}})
    for i in range(1, count + 1):
        at = 10.0 * i
        trace.add(
            Span("rollout", i, 0, 1, "gpu", at, at + 4),
            Span("reward_collect", i, 0, 1, "reward", at + 4, at + 9, {}, f"rollout[{i}]"),
            Span("actor_update", i, 0, 1, "gpu", at + 9, at + 10, {}, f"reward_collect[{i}]"),
            Mark("reward", "reward", at + 4, at + 9, {"step": i}),
        )
    return trace


def test_off_a_terminal_a_step_is_a_plain_line() -> None:
    progress, file = screen(terminal=False)
    progress.start(20)
    progress.evaluation(0, 0.25, True)
    progress.show(steps(3), [], {"running": 3}, 100)
    progress.step(7, METRICS)
    progress.evaluation(6, 0.875, False)
    progress.stop()
    assert file.getvalue() == (
        "evaluation before training: accuracy 0.250\n"
        "step 7/20  reward 0.50  p95 0.75 s  2 tried again  exposed wait 1.25 s  staleness 1\n"
        "evaluation of step 6: score 0.875\n"
    )


def test_on_a_terminal_a_picture_moves() -> None:
    progress, file = screen(terminal=True)
    progress.start(20)
    progress.show(Trace(), [], {}, 100)
    progress.step(3, METRICS)
    progress.show(steps(3), [], {"reward": {"running": 5, "waiting": 2, "limit": 8}}, 100)
    progress.stop()
    progress.stop()
    said = file.getvalue()
    assert "training" in said
    assert "3/20" in said
    assert "reward 0.50" in said
    assert "in flight" in said
    assert "rewards in flight 5 of 8  queued 2" in said
    assert "\x1b[?25h" in said, "the cursor is back"
    progress.show(steps(3), [], {}, 100)  # late news
    assert file.getvalue() == said


def test_the_last_three_steps_are_drawn_with_what_runs() -> None:
    running = Span("rollout", 51, 0, 1, "gpu", 510, 511)
    progress, file = screen(terminal=True)
    progress.start(60)
    progress.show(steps(50), [running], {}, most=12)
    progress.stop()
    gpu = next(line for line in file.getvalue().splitlines() if "gpu" in line)
    assert [gpu.count(f"R{i}") for i in range(48, 52)] == [0, 1, 1, 1]


def test_quiet_prints_nothing() -> None:
    file = io.StringIO()
    progress = Progress(console=Console(file=file, force_terminal=True, quiet=True))
    progress.start(2)
    progress.step(1, METRICS)
    progress.show(steps(1), [], {}, 10)
    progress.stop()
    assert file.getvalue() == ""


def test_the_warm_up_is_a_sentence_and_on_a_terminal_a_bar() -> None:
    progress, file = screen(terminal=False)
    for done in (1, 5, 10):
        progress.warm_up(done, 10)
    assert file.getvalue() == "making the tiny model: a short supervised warm-up, cached for later runs\n"
    progress, file = screen(terminal=True)
    for done in (1, 10):
        progress.warm_up(done, 10)
    shown = file.getvalue()
    assert shown.count("making the tiny model") == 1
    assert "warm-up" in shown
    assert "10/10" in shown.rpartition("warm-up")[2]


def test_the_numbers_of_now() -> None:
    stats = {
        "running": 64,
        "waiting": 10,
        "limit": 64,
        "latency_s": {"p95": 1.25},
        "failed": 2,
        "retried": 0,
        "throttled": 3,
    }
    assert facts({"reward": stats}, {"staleness/max": 1.0, "overlap/exposed_wait_s": 0.3}).split("  ") == [
        "rewards in flight 64 of 64",
        "queued 10",
        "p95 1.25 s",
        "2 failed",
        "3 throttled",
        "exposed wait 0.30 s a step",
        "staleness 1",
    ]
    assert facts({"reward": {"running": 0, "waiting": 0, "latency_s": {}}}, {}) == "rewards in flight 0  queued 0"
    assert facts({}, {}) == ""
