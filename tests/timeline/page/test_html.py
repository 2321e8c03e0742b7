"""The page is one complete file, the same each time; test_browser tests its behaviour."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dataflow.drawing.page import renumbered
from dataflow.errors import DataError
from dataflow.timeline.causes.culprits import last_requests, linked
from dataflow.timeline.page.html import page, text
from dataflow.timeline.page.looks import MARKS, causes, themed
from dataflow.timeline.page.tracks import sheet, step_ends, thin
from dataflow.timeline.page.versions import Versions
from dataflow.timeline.spans import Mark, Span, Trace
from tests.rigs.made_up import made_up
from tests.timeline.causes.test_culprits import two_parts

EVIL = "<script>alert('x')</script>"


class Page(HTMLParser):
    """What of a page a browser would load, run or read."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: list[str] = []
        self.data: dict[str, str] = {}
        self.words = ""
        self._in: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        self._in = (tag, facts)
        for name in ("src", "href"):
            if (to := facts.get(name)) and not to.startswith("data:"):
                self.loads.append(to)

    def handle_endtag(self, tag: str) -> None:
        self._in = ("", {})

    def handle_data(self, data: str) -> None:
        tag, facts = self._in
        if tag == "script" and facts.get("type") == "application/json":
            self.data[str(facts.get("id"))] = data
        elif tag == "script":
            self.scripts.append(data)
        elif tag != "style":
            self.words += data

    @property
    def facts(self) -> dict[str, Any]:
        return dict(json.loads(self.data["facts"]))


def written(tmp_path: Path, traces: Any, **more: Any) -> Page:
    page(traces, tmp_path / "run.html", **more)
    assert [p.name for p in tmp_path.iterdir()] == ["run.html"]
    return Page(tmp_path / "run.html")


@pytest.mark.slow
def test_a_page_holds_all_it_needs_and_says_how_the_run_went(tmp_path: Path) -> None:
    trace = made_up(6)
    found = written(tmp_path, trace)
    assert found.loads == []
    assert not re.search(r"https?://(?!www\.w3\.org)[^\"'\s]*bokeh-[\d.]+", "".join(found.scripts))
    for word in ("6 steps in", "a step", "gpu busy", "lower bound", "reward requests", "longest waits", "rewards"):
        assert word in found.words
    assert "interrupted" not in found.words
    assert found.facts["stages"] == trace.stages


@pytest.mark.heavy
def test_slow_groups_link_to_their_text(tmp_path: Path) -> None:
    trace = made_up(6)
    address = 'samples.html?a="b'
    found = written(tmp_path, trace, facts={"both": {"samples": address}})
    assert found.loads
    assert all(re.fullmatch(re.escape(address) + r"#step-\d+-group-\d+", to) for to in found.loads)
    assert found.facts["samples"] == [address]
    places = {to.partition("#")[2] for to in found.loads}
    assert places <= {f"step-{step}-group-{group}" for step, group in linked(trace)}
    assert written(tmp_path, trace).loads == []


@pytest.mark.heavy
def test_the_same_traces_give_the_same_file(tmp_path: Path) -> None:
    runs = {"a": made_up(3), "b": made_up(4, seed=1)}
    page(runs, tmp_path / "1.html")
    text({"other": made_up(2)})
    page(runs, tmp_path / "2.html")
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()


def test_ids_are_counted_from_one_and_nothing_else_is_touched() -> None:
    item = {"root_id": "p1042", "doc": {"roots": [{"id": "p1042", "name": "p1042", "data": ["p1042", {"id": "p7"}]}]}}
    assert renumbered(item) == {
        "root_id": "p1",
        "doc": {"roots": [{"id": "p1", "name": "p1042", "data": ["p1042", {"id": "p2"}]}]},
    }


@pytest.mark.heavy
def test_ten_thousand_tasks_stay_under_six_megabytes(tmp_path: Path) -> None:
    trace = made_up(589)
    assert len(trace.spans) >= 10_000
    assert len(trace.marks) >= 2_000
    page(trace, tmp_path / "long.html")
    assert (tmp_path / "long.html").stat().st_size < 6_000_000


@pytest.mark.slow
def test_names_from_a_trace_are_shown_and_never_run(tmp_path: Path) -> None:
    trace = two_parts()
    trace.add(Span(EVIL, 1, 0, 1, EVIL, 0, 3, {EVIL: EVIL, "samples": 8}, EVIL))
    trace.meta |= {"policy": EVIL, "status": EVIL, "cut": EVIL, "order": EVIL}
    page({EVIL: trace, "</script>": trace}, tmp_path / "run.html", title=EVIL)
    whole = (tmp_path / "run.html").read_text()
    assert "<script>alert" not in whole
    found = Page(tmp_path / "run.html")
    assert EVIL in found.words
    assert found.facts["runs"] == [EVIL, "</script>"]
    assert EVIL in found.facts["stages"]


def test_what_cannot_be_shown_is_said_in_a_sentence(tmp_path: Path) -> None:
    for given, name, said in (
        (Trace(meta={"policy": "both"}), "run.html", "run 'both' has no task"),
        ({}, "run.html", "no run to show"),
        (two_parts(), "run.pdf", r"give a name in \.html"),
    ):
        with pytest.raises(DataError, match=said):
            page(given, tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_the_mark_of_a_layer_has_the_colour_that_is_drawn() -> None:
    drawn = sheet({"run": made_up(2, requests=2)})
    (band,) = [value[2:] for value in themed(drawn, ["#000000"] * len(drawn.stages)) if value[0] == "band-glyph-0"]
    light, dark = MARKS.split("@media (prefers-color-scheme: dark)")
    assert f"nth-child(2)::before {{ background: {band[0]}; }}" in light
    assert f"nth-child(2)::before {{ background: {band[1]}; }}" in dark


def test_gaps_have_the_colour_of_their_cause() -> None:
    drawn = sheet({"run": made_up(6)})
    assert set(drawn.causes) == set(drawn.waits["cause"])
    assert [drawn.causes[i] for i in drawn.waits["cause_index"]] == drawn.waits["cause"]
    light, dark = causes(drawn)
    assert len(set(light)) == len(set(dark)) == len(drawn.causes) > 1


@pytest.mark.heavy
def test_several_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    runs = {"baseline": made_up(4), "both": made_up(4, seed=3)}
    facts = {"baseline": {"accuracy_before": 0.125, "accuracy_after": 0.75}}
    found = written(tmp_path, runs, facts=facts)
    change = runs["both"].wall / runs["baseline"].wall - 1
    assert f"{change:+.1%}".replace("-", "−") in found.words
    assert "0.125 → 0.750" in found.words
    drawn = sheet(runs)
    assert drawn.names == ["baseline", "both"]
    assert set(drawn.spans["run"]) == {0, 1}
    assert max(b for b, r in zip(drawn.spans["bottom"], drawn.spans["run"], strict=True) if r == 0) < drawn.heads[1]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("status", "said"), [("interrupted", "was interrupted"), ("failed", "failed"), ("running", "not ended")]
)
def test_a_run_that_did_not_finish_says_so(tmp_path: Path, status: str, said: str) -> None:
    trace = made_up(2)
    trace.meta["status"] = status
    assert said in written(tmp_path, trace).words


@pytest.mark.heavy
def test_a_trace_that_was_cut_off_says_what_is_missing(tmp_path: Path) -> None:
    trace = made_up(2)
    trace.meta |= {"status": "cut off", "cut": "cut off after 3 s <of 9>"}
    assert "Cut off after 3 s <of 9>." in written(tmp_path, trace).words


# --- what is drawn ------------------------------------------------------------------------------------------------


def test_waits_and_who_they_were_for_are_in_the_columns() -> None:
    drawn = sheet({"run": two_parts()})
    waits = list(zip(*(drawn.waits[name] for name in ("begin", "end", "cause", "task", "who")), strict=True))
    assert waits[1] == (
        6, 11, "rewards", "actor_update[1.2]",
        "step 1, group 5, 3 tries, throttled 2 times, queued 1.2 s, at last for the rate limit",
    )  # fmt: skip
    requests = list(zip(*(drawn.requests[name] for name in ("step", "begin", "end", "to_x", "task")), strict=True))
    assert requests == [(1, 1, 4, 4, "actor_update[1.1]"), (1, 1, 11, 11, "actor_update[1.2]")]


def test_the_last_request_is_led_to_its_update_even_if_nobody_waited() -> None:
    trace = Trace(meta={"resources": {"gpu": 1, "reward": None}})
    trace.add(
        Span("rollout", 1, 0, 1, "gpu", 0, 8),
        Span("reward_collect", 1, 0, 1, "reward", 1, 3, {}, "rollout[1]"),
        Span("actor_update", 1, 0, 2, "gpu", 8, 9, {}, "rollout[1]"),
        Span("actor_update", 1, 1, 2, "gpu", 9, 10, {}, "actor_update[1.1]"),
        Mark("reward", "reward", 1, 2, {"step": 1, "group": 0}),
        Mark("reward", "reward", 1, 3, {"step": 1, "group": 1}),
        Mark("reward", "reward", 1, 30, {"step": 1, "group": 1, "validation": True}),
    )
    drawn = sheet({"run": trace})
    assert drawn.requests["end"] == [3]
    assert drawn.requests["task"] == ["actor_update[1.1]"]
    assert drawn.requests["to_x"] == [8]
    assert list(last_requests(trace.marks)) == [(1, -1)]


def test_tasks_that_overlap_have_lanes_of_their_own() -> None:
    trace = Trace()
    trace.add(Span("a", 1, 0, 1, "io", 0, 4), Span("a", 2, 0, 1, "io", 1, 2), Span("b", 2, 0, 1, "gpu", 0, 1))
    spans = sheet({"run": trace}).spans
    (first, second, _) = zip(spans["top"], spans["bottom"], strict=True)
    assert first[1] <= second[0]


def test_facts_of_a_task() -> None:
    trace = made_up(4)
    drawn = sheet({"run": trace})
    at = next(i for i, s in enumerate(trace.stages) if s == "actor_update")
    update = next(i for i, s in enumerate(drawn.spans["stage"]) if s == at and drawn.spans["step"][i] == 3)
    assert (drawn.spans["version"][update], drawn.spans["stale"][update]) == (1, 1)
    assert math.isnan(drawn.spans["samples"][update])
    own = Span("mine", 1, 0, 1, "io", 0, 1, {"note": "two\nlines", "long": "x" * 500, "score": 0.123456789})
    said = sheet({"run": Trace([own])}).spans["more"][0].split("\n")
    assert [line.partition("\t")[0] for line in said] == ["note", "long", "score"]
    assert said[0] == "note\ttwo lines"
    assert len(said[1]) < 100
    assert said[2] == "score\t0.123457"


def test_staleness_is_of_the_samples_an_update_trains_on() -> None:
    trace = Trace()
    trace.add(
        Span("rollout", 3, 0, 1, "gpu", 0, 1, {"weights_version": 1}),
        Span("actor_update", 3, 0, 1, "gpu", 1, 2),
        Span("actor_update", 4, 0, 1, "gpu", 2, 3, {"staleness": 2}),
        Span("val_rollout", 3, 0, 1, "gpu", 3, 4, {"weights_version": 0, "optional": True}),
        Span("sync_weights", 3, 0, 1, "gpu", 4, 5, {"weights_version": 3}),
    )
    versions = Versions(trace)
    assert versions.of_step == {3: 1}
    assert [versions.staleness(span) for span in trace.spans] == [1, 1, 2, None, None]


def test_steps_end_with_their_last_update_and_a_step_that_was_cut_off_does_not() -> None:
    trace = made_up(3)
    ends = step_ends(trace)
    assert ends == {
        step: max(s.end for s in trace.spans if s.stage == "actor_update" and s.step == step) for step in (1, 2, 3)
    }
    last = max(trace.spans, key=lambda s: (s.step, s.stage == "actor_update", s.part))
    trace.spans.remove(last)
    assert list(step_ends(trace)) == [1, 2]
    assert step_ends(Trace()) == {}


def test_a_band_of_many_points_keeps_its_heights() -> None:
    levels = [(i / 10, 1 + i % 7) for i in range(1000)] + [(100.0, 0)]
    few = thin(levels, 50)
    assert len(few) <= 52
    assert max(level for _, level in few) == 7
    assert few[0][0] == 0.0
    assert few[-1] == (100.0, 0)
    assert [time for time, _ in few] == sorted(time for time, _ in few)
    # Through a stretch in which nothing changes the level stays.
    assert thin([(0.0, 3), (1.0, 5), (2.0, 2), (30.0, 0)], 3) == [(0.0, 5), (10.0, 2), (30.0, 0)]
    assert thin([(0.0, 3), (21.0, 2), (22.0, 4), (30.0, 0)], 3) == [(0.0, 3), (10.0, 3), (20.0, 4), (30.0, 0)]
    assert thin(levels[:3], 50) == levels[:3]


@pytest.mark.heavy
@pytest.mark.parametrize(
    "trace",
    [
        Trace([Span("rollout", 1, 0, 1, "gpu", 0, 0)]),
        Trace([Span("rollout", 1, 0, 1, "sandbox", 0, 1)], [Mark("reward", "reward", 0, 1)]),
        Trace([Span("val_rollout", 0, 0, 1, "gpu", 0, 1, {"optional": True})], meta={"status": "interrupted"}),
        Trace([Span("rollout", 1, 0, 1, "gpu", 0, 1, {"emitted_s": [0.5]})], [Mark("r", "gpu", 0, 1, {"step": "x"})]),
    ],
)
def test_odd_runs_are_shown_too(tmp_path: Path, trace: Trace) -> None:
    page(trace, tmp_path / "run.html")
    assert (tmp_path / "run.html").stat().st_size > 100_000
