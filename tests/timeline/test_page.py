"""The page is one complete file, the same each time; test_browser tests its behaviour."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dataflow.timeline.causes import linked
from dataflow.timeline.page import chart, page
from dataflow.timeline.spans import Span, Trace
from tests.rigs.made_up import made_up
from tests.timeline.test_causes import two_parts

EVIL = "<script>alert('x')</script>"


class Page(HTMLParser):
    """What of a page a browser would load or read."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.data: dict[str, Any] = {}
        self.words = ""
        self._in: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = dict(attrs)
        self._in = (tag, facts)
        self.loads += [to for name in ("src", "href") if (to := facts.get(name)) and not to.startswith("data:")]

    def handle_endtag(self, tag: str) -> None:
        self._in = ("", {})

    def handle_data(self, data: str) -> None:
        tag, facts = self._in
        if facts.get("type") == "application/json":
            self.data = json.loads(data)
        elif tag not in ("script", "style"):
            self.words += data


def written(tmp_path: Path, traces: Any, **more: Any) -> Page:
    page(traces, tmp_path / "run.html", **more)
    assert [p.name for p in tmp_path.iterdir()] == ["run.html"]
    return Page(tmp_path / "run.html")


def test_a_page_holds_all_it_needs_and_says_how_the_run_went(tmp_path: Path) -> None:
    found = written(tmp_path, made_up(6))
    assert found.loads == []
    for word in ("6 steps in", "a step", "gpu busy", "lower bound", "reward requests", "longest waits", "rewards"):
        assert word in found.words
    assert "interrupted" not in found.words
    before = (tmp_path / "run.html").read_bytes()
    written(tmp_path, made_up(6))
    assert (tmp_path / "run.html").read_bytes() == before


def test_slow_groups_link_to_their_text(tmp_path: Path) -> None:
    trace = made_up(6)
    address = 'samples.html?a="b'
    found = written(tmp_path, trace, facts={"both": {"samples": address}})
    assert found.loads
    drawn = {wait["address"] for wait in found.data["waits"] if wait["address"]}
    assert set(found.loads) <= drawn
    assert drawn == {f"{address}#step-{step}-group-{group}" for step, group in linked(trace)}


def test_names_from_a_trace_are_shown_and_never_run(tmp_path: Path) -> None:
    trace = two_parts()
    trace.add(Span(EVIL, 1, 0, 1, EVIL, 0, 3, {EVIL: EVIL, "samples": 8}, EVIL))
    trace.meta |= {"policy": EVIL, "status": EVIL, "cut": EVIL, "order": EVIL}
    found = written(tmp_path, {EVIL: trace, "</script>": trace}, title=EVIL)
    assert "<script>alert" not in (tmp_path / "run.html").read_text()
    assert EVIL in found.words
    assert [run["name"] for run in found.data["runs"]] == [EVIL, "</script>"]
    assert EVIL in found.data["stages"]


def test_several_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    runs = {"baseline": made_up(4), "both": made_up(4, seed=3)}
    found = written(tmp_path, runs, facts={"baseline": {"accuracy_before": 0.125, "accuracy_after": 0.75}})
    assert f"{runs['both'].wall / runs['baseline'].wall - 1:+.1%}" in found.words
    assert "0.12 -> 0.75" in found.words
    assert re.search(r"fastest: (baseline|both)", found.words)
    below = found.data["runs"][1]["y"]
    assert all((bar["y"][1] < below) != bar["task"].startswith("both: ") for bar in found.data["bars"])


@pytest.mark.parametrize(
    ("meta", "said"),
    [
        ({"status": "interrupted"}, "was interrupted"),
        ({"status": "failed"}, "failed"),
        ({"status": "running"}, "not ended"),
        ({"status": "cut off", "cut": "cut off after 3 s <of 9>"}, "Cut off after 3 s <of 9>."),
    ],
)
def test_a_run_that_did_not_finish_says_so(tmp_path: Path, meta: dict[str, Any], said: str) -> None:
    trace = made_up(2)
    trace.meta |= meta
    assert said in written(tmp_path, trace).words


# --- what is drawn ------------------------------------------------------------------------------------------------


def test_waits_say_who_they_were_for() -> None:
    drawn = chart({"run": two_parts()}, {})
    wait = drawn["waits"][0]
    assert (wait["x"], wait["cause"], wait["task"]) == ([6, 11], "rewards", "actor_update[1.2]")
    assert "came last\tstep 1, group 5, 3 tries, throttled 2 times, queued 1.2 s" in wait["tip"]
    assert {"rewards"} == set(drawn["causes"])


def test_facts_of_a_task() -> None:
    bars = chart({"run": made_up(4)}, {})["bars"]
    update = next(bar["tip"] for bar in bars if bar["task"] == "actor_update[3.1]")
    assert "\nwaited for\tadvantage[3.1]" in update
    own = Span("mine", 1, 0, 1, "io", 0, 1, {"note": "two\nlines", "long": "x" * 500, "score": 0.123456789})
    *_, note, long, score = chart({"run": Trace([own])}, {})["bars"][0]["tip"].split("\n")
    assert (note, score) == ("note\ttwo lines", "score\t0.123457")
    assert len(long) < 100
