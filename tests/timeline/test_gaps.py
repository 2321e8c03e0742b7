"""The time between a kill and the resume takes no place in a trace, and is said everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.running.record import Record
from dataflow.timeline import perfetto
from dataflow.timeline.causes import Wait, culprits, exposed_waits, summary
from dataflow.timeline.page import page
from dataflow.timeline.picture import draw
from dataflow.timeline.spans import Span, Trace
from dataflow.timeline.text import gantt, idle_lines
from tests.timeline.traces import trace_format
from tests.timeline.traces.resumed import WHY, resumed

WORDS = f"not running 3 h 12 min, {WHY}"
TITLE = "both: 3 steps in 39.0 s, not running 3 h 12 min, gpu busy 57.7%, exposed wait 16.5 s (rewards 12.0, "


def test_the_figures_are_those_of_the_same_run_without_the_kill() -> None:
    whole, cut = summary(resumed(killed=False)), summary(resumed())
    assert (cut.pop("resumed"), cut.pop("not_running_s")) == ([2], 3.2 * 3600)
    assert (whole.pop("resumed"), whole.pop("not_running_s")) == ([], 0)
    by_cause, usual = cut.pop("exposed_wait_by_cause"), whole.pop("exposed_wait_by_cause")
    # Nothing ran after the checkpoint of step 2, so that the GPUs' last wait before the kill was for it.
    assert by_cause == pytest.approx(usual | {"dispatch": usual["dispatch"] - 1, "io": usual["io"] + 1})
    assert cut == whole


def test_a_wait_over_a_gap_is_cut_and_each_side_keeps_its_cause() -> None:
    trace = Trace(
        [
            Span("rollout", 1, 0, 1, "gpu", 0, 4),
            Span("save", 1, 0, 1, "io", 4, 6, {}, "rollout[1]"),
            Span("prompts", 2, 0, 1, "controller", 6, 7),
            Span("rollout", 2, 0, 1, "gpu", 7, 10, {}, "prompts[2]"),
        ],
        meta={"gaps": [[6, 100, "resumed from step 1"]], "resumed": [1]},
    )
    assert exposed_waits(trace) == [
        Wait(4, 6, "io", "save[1]", "save[1]"),
        Wait(6, 7, "controller", "rollout[2]", "prompts[2]"),
    ]
    assert [c.words for c in culprits(trace)] == ["step 1, save", "step 2, prompts"]


def test_a_resumed_run_goes_on_where_its_trace_was_cut(tmp_path: Path) -> None:
    """Killed at 1060 and, from an older checkpoint, at 1120: of the time until 1200 it kept 10 s, and then 5 s."""
    record = Record(tmp_path)
    assert record.begin(1000.0) == 1000
    record.trace.add(*(Span("update", step, 0, 1, "gpu", 10 * step - 10, 10 * step) for step in (1, 2)))
    record.cut(1, frozenset(), 0)
    origin = record.begin(1100.0)
    assert origin == 1090, "the next task begins 10 s after the first"
    record.trace.add(Span("update", 2, 0, 1, "gpu", 10, 15), Span("update", 3, 0, 1, "gpu", 15, 30))
    record.cut(2, frozenset(), 0)
    assert record.begin(1200.0) == 1185
    first, second = record.trace.gaps
    assert (first.at, first.seconds, first.why) == (
        10,
        90,
        "resumed from step 1, and 10.0 s of work after it were lost",
    )
    assert (second.at, second.seconds) == (15, 95)
    record.cut(1, frozenset(), 0)
    assert record.begin(1300.0) == 1290
    assert [gap.at for gap in record.trace.gaps] == [10, 10, 10]
    assert sum(gap.seconds for gap in record.trace.gaps) == 290


def test_text_page_and_picture_mark_the_gap(tmp_path: Path) -> None:
    title, _, text = gantt(resumed(), width=72).partition("\n")
    assert title.startswith(TITLE)
    assert [row[:4] for row in text.splitlines() if "/" in row[:72]][:2] == ["gpu ", "rewa"]
    assert f"/ {WORDS}" in text
    assert idle_lines(resumed())[-1] == WORDS
    page(resumed(), tmp_path / "run.html")
    assert f"3 h 12 min <small>{WHY}</small>" in (tmp_path / "run.html").read_text()


@pytest.mark.slow
def test_the_picture_says_how_long_and_from_where(tmp_path: Path) -> None:
    draw({"plain": resumed(killed=False), "resumed": resumed()}, tmp_path / "runs.svg")
    assert WORDS in (tmp_path / "runs.svg").read_text()


def test_perfetto_gets_a_line_across_that_is_read_back_as_meta(tmp_path: Path) -> None:
    path, trace = tmp_path / "trace.json", resumed()
    perfetto.write(trace, path)
    events = json.loads(path.read_text())
    trace_format.check(events)
    (gap,) = [e for e in events if e.get("cat") == "gap"]
    assert (gap["name"], gap["ts"], gap["s"]) == (WORDS, 26_000_000, "g")
    assert perfetto.read(path) == trace
