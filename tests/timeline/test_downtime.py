"""The time in which a run was not running counts nowhere, and is shown everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.timeline import perfetto
from dataflow.timeline.causes.attribution import Wait, exposed_waits, summary
from dataflow.timeline.causes.culprits import culprits
from dataflow.timeline.downtime import Axis, Downtime
from dataflow.timeline.page.chart import chart
from dataflow.timeline.page.page import page
from dataflow.timeline.picture import draw
from dataflow.timeline.spans import Span, Trace
from dataflow.timeline.text import gantt, idle_lines
from tests.timeline.traces import trace_format
from tests.timeline.traces.resumed import WHY, resumed

KILLED_S = 3.2 * 3600

TITLE = "both: 3 steps in 39.0 s, not running 3 h 12 min, gpu busy 57.7%, exposed wait 16.5 s (rewards 12.0, "

GOLDEN = """
gpu         R1====~~~~~~U1==S1~R2====~~~~~~U2==S2~///R3====~~~~~~U3==S3~
reward            C1====             C2====       ///      C3====
controller              A                  A      ///            A
io                            K                  K///                  K
in flight        ███▆▄▄▂            ███▆▄▄▂       ///     ███▆▄▄▂
            |0 s           |10           |20      ///      |30
R rollout  C reward_collect  A advantage  U actor_update  S sync_weights
K save_checkpoint  ~ gpu waits  █ 4 rewards in flight
/// not running 3 h 12 min, resumed from step 2  (cut out of the axis)
"""
"""Without its title."""


def test_the_figures_are_those_of_the_same_run_without_the_kill() -> None:
    whole, cut = summary(resumed(killed=False)), summary(resumed())
    assert (cut.pop("resumed"), cut.pop("not_running_s")) == ([2], KILLED_S)
    assert (whole.pop("resumed"), whole.pop("not_running_s")) == ([], 0)
    stages = cut.pop("stages")
    assert stages == {name: pytest.approx(of) for name, of in whole.pop("stages").items()}
    assert cut.pop("busy") == pytest.approx(whole.pop("busy"))
    by_cause, usual = cut.pop("exposed_wait_by_cause"), whole.pop("exposed_wait_by_cause")
    # Nothing ran after the checkpoint of step 2, so that the GPUs' last wait before the kill was for it.
    assert by_cause == pytest.approx(usual | {"dispatch": usual["dispatch"] - 1, "io": usual["io"] + 1})
    assert cut == pytest.approx(whole)
    assert cut["wall_s"] == pytest.approx(39)


def test_a_wait_over_a_downtime_is_cut_and_each_side_keeps_its_cause() -> None:
    trace = Trace(
        [
            Span("rollout", 1, 0, 1, "gpu", 0, 4),
            Span("save", 1, 0, 1, "io", 4, 6, {}, "rollout[1]"),
            Span("prompts", 2, 0, 1, "controller", 106, 107),
            Span("rollout", 2, 0, 1, "gpu", 107, 110, {}, "prompts[2]"),
        ],
        meta={"gaps": [[6, 106, "resumed from step 1"]], "resumed": [1]},
    )
    assert exposed_waits(trace) == [
        Wait(4, 6, "io", "save[1]", "save[1]"),
        Wait(106, 107, "controller", "rollout[2]", "prompts[2]"),
    ]
    assert [c.words for c in culprits(trace)] == ["step 1, save", "step 2, prompts"]
    assert exposed_waits(trace, window=(5, 106.5)) == [
        Wait(5, 6, "io", "save[1]", "save[1]"),
        Wait(106, 106.5, "controller", "rollout[2]", "prompts[2]"),
    ]


@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20), st.sampled_from(["gpu", "io"])), min_size=1, max_size=12),
    st.lists(st.tuples(st.floats(-5, 60), st.floats(0, 30)), max_size=4),
)
def test_busy_time_and_waits_add_up_to_the_time_in_which_it_ran(
    tasks: list[tuple[float, float, str]], cuts: list[tuple[float, float]]
) -> None:
    spans = [Span("own", i, 0, 1, on, at, at + took) for i, (at, took, on) in enumerate(tasks)]
    trace = Trace(spans, meta={"gaps": [[at, at + took, ""] for at, took in cuts], "resumed": [0] * len(cuts)})
    waits = exposed_waits(trace)
    assert trace.busy("gpu") + sum(w.seconds for w in waits) == pytest.approx(trace.wall, abs=1e-6)
    for wait in waits:
        assert all(wait.end <= down.begin or wait.begin >= down.end for down in trace.downtimes)


def test_an_axis_leaves_downtimes_out_and_leaves_room_for_their_marks() -> None:
    axis = Axis([Downtime(10, 110), Downtime(120, 130), Downtime(500, 600)], 5, 140, wide=2)
    assert (axis.running, axis.length, len(axis.downtimes)) == (25, 29, 2)
    assert [axis.at(t) for t in (5, 10, 60, 110, 115, 120, 130, 140)] == [0, 5, 6, 7, 12, 17, 19, 29]
    assert [axis.after(s) for s in (0, 4, 6, 15, 16, 25)] == [0, 4, 8, 17, 20, 29]
    within = Axis([Downtime(10, 110)], 60, 120)
    assert (within.running, within.at(60), within.at(110), within.at(120)) == (10, 0, 0, 10)


# --- what is shown ------------------------------------------------------------------------------------------


def test_the_text_marks_the_cut() -> None:
    title, _, text = gantt(resumed(), width=72).partition("\n")
    assert title.startswith(TITLE)
    assert text == GOLDEN.lstrip("\n")
    assert gantt(resumed(hours=1000), width=72).splitlines()[1:7] == text.splitlines()[:6]
    assert idle_lines(resumed())[-1] == f"not running 3 h 12 min: {WHY}"


def test_the_page_cuts_its_axis(tmp_path: Path) -> None:
    drawn = chart({"plain": resumed(killed=False), "resumed": resumed()}, {})
    assert drawn["length"] == pytest.approx(39 * 1.005)
    (cut,) = drawn["cuts"]
    assert (cut["x"], cut["words"]) == (26, "not running 3 h 12 min, resumed from step 2")
    assert cut["tip"].endswith(WHY)
    page(resumed(), tmp_path / "run.html")
    assert f"3 h 12 min <small>{WHY}</small>" in (tmp_path / "run.html").read_text()


@pytest.mark.slow
def test_the_picture_says_how_long_and_from_where(tmp_path: Path) -> None:
    path = tmp_path / "runs.svg"
    draw({"plain": resumed(killed=False), "resumed": resumed()}, path)
    text = path.read_text()
    assert "not running 3 h 12 min, resumed from step 2" in text
    assert "time in which a run was not running is cut out" in text
    assert ">35<" in text
    assert ">40<" not in text
    draw(resumed(killed=False), path)
    assert "not running" not in path.read_text()


def test_perfetto_gets_a_track_of_its_own_that_is_read_back_as_meta(tmp_path: Path) -> None:
    path, trace = tmp_path / "trace.json", resumed()
    perfetto.write(trace, path)
    events = json.loads(path.read_text())
    trace_format.check(events)
    (down,) = [e for e in events if e.get("cat") == "gap"]
    assert down["name"] == "not running 3 h 12 min, resumed from step 2"
    assert (down["ts"], down["dur"]) == (26_000_000, round(KILLED_S * 1e6))
    (track,) = [e for e in events if e["name"] == "thread_name" and e["args"]["name"] == "not running"]
    assert track["tid"] == down["tid"]
    read = perfetto.read(path)
    assert read == trace
    assert read.downtimes == trace.downtimes
