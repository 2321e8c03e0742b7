"""The picture of a running run."""

from __future__ import annotations

from dataflow.running.reporting.live import facts, picture, recent
from dataflow.timeline.spans import Mark, Span, Trace


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


def test_of_a_long_run_the_last_tasks_are_looked_at() -> None:
    shown = recent(steps(50), [], most=9)
    assert {s.step for s in shown.spans} == {48, 49, 50}
    assert {m.args["step"] for m in shown.marks} == {48, 49, 50}
    assert recent(Trace(), [], most=10).spans == []


def test_the_last_three_steps_are_drawn_with_what_runs() -> None:
    running = Span("rollout", 6, 0, 1, "gpu", 60, 61)
    gpu = picture(recent(steps(5), [running], most=100), 100).plain.splitlines()[0]
    assert [gpu.count(f"R{i}") for i in range(1, 7)] == [0, 0, 0, 1, 1, 1]
    assert not gpu.split()[1].startswith("~"), "what went before is known: nothing waited there"


def test_the_picture_has_a_row_for_each_resource_and_a_colour_for_each_stage() -> None:
    text = picture(recent(steps(3), [], most=100), 80)
    rows = text.plain.splitlines()
    assert [row.split(" ")[0] for row in rows] == ["gpu", "reward", "in", ""]
    assert rows[0].count("R") == rows[0].count("U") == 3
    assert "|0 s" in rows[-1]
    assert all(len(row) <= 80 for row in rows)
    looks = {str(text.get_style_at_offset(_console(), text.plain.index(letter))) for letter in "RUC~"}
    assert len(looks) == 4


def _console() -> object:
    from rich.console import Console

    return Console(force_terminal=True)


def test_the_numbers_of_now() -> None:
    stats = {
        "running": 64,
        "waiting": 10,
        "limit": {"": 64},
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


def test_the_numbers_of_each_agent() -> None:
    stats = {
        "reward": {"running": 3, "waiting": 1, "limit": {"": 64}},
        "style": {"running": 8, "waiting": 0, "failed": 2},
    }
    said = facts(stats, {}).split("  ")
    assert said == ["reward in flight 3 of 64", "queued 1", "style in flight 8", "queued 0", "2 failed"]
