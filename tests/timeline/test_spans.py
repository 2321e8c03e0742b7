"""Spans, their labels, and the interval arithmetic."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from dataflow.timeline.spans import Mark, Span, Trace, covered, in_flight, lanes, union

times = st.floats(0, 100, allow_nan=False)
intervals = st.lists(st.tuples(times, times).map(lambda t: (min(t), max(t))), max_size=12)


def span(
    begin: float, end: float, stage: str = "rollout", resource: str = "gpu", step: int = 1, **args: object
) -> Span:
    return Span(stage, step, 0, 1, resource, begin, end, dict(args))


def test_wall_ends_with_training_and_busy_stays_inside_it() -> None:
    trace = Trace()
    trace.add(span(1, 3), span(5, 8), span(9, 12, "val_rollout", optional=True), Mark("reward", "reward", 3, 6))
    assert trace.wall == 7
    assert trace.window == (1, 8)
    assert trace.busy("gpu") == 5
    assert trace.busy("reward") == 0
    assert len(trace.marks) == 1


@given(intervals)
def test_union_is_apart_and_covers_the_same(given: list[tuple[float, float]]) -> None:
    merged = union(given)
    assert all(a < b for a, b in merged)
    assert all(merged[i][1] < merged[i + 1][0] for i in range(len(merged) - 1))
    for a, b in given:
        assert a == b or any(c <= a and b <= d for c, d in merged)
    assert covered(given, 0, 100) <= 100
    assert covered(given, 0, 100) >= max((b - a for a, b in given), default=0)


@given(intervals)
def test_lanes_do_not_overlap_and_are_as_few_as_can_be(given: list[tuple[float, float]]) -> None:
    spans = [span(a, b) for a, b in given]
    rows = lanes(spans)
    assert sorted(id(s) for row in rows for s in row) == sorted(map(id, spans))
    for row in rows:
        assert all(row[i].end <= row[i + 1].begin for i in range(len(row) - 1))
    at_once = max((level for _, level in in_flight(Mark("", "", a, b) for a, b in given)), default=0)
    assert len(rows) >= at_once
    if all(a < b for a, b in given):
        assert len(rows) == at_once


@given(intervals)
def test_in_flight_starts_and_ends_at_none(given: list[tuple[float, float]]) -> None:
    levels = in_flight(Mark("reward", "reward", a, b) for a, b in given)
    assert all(levels[i][0] < levels[i + 1][0] for i in range(len(levels) - 1))
    assert all(level >= 0 for _, level in levels)
    assert not levels or levels[-1][1] == 0


def test_the_timeline_loads_nothing_heavy() -> None:
    code = (
        "import sys, dataflow.timeline.causes, dataflow.timeline.perfetto, dataflow.timeline.text,"
        " dataflow.timeline.picture, dataflow.running.reporting.timings;"
        "print([m for m in ('torch', 'ray', 'verl', 'matplotlib', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
