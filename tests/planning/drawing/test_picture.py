"""A plan's picture is complete; its look is not tested."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import DataError
from dataflow.planning.drawing.chart import Bars, Panel
from dataflow.planning.drawing.picture import draw_plan
from dataflow.planning.planner import ROWS, Prediction, Sweep

STEPS = 10


def prediction(policy: str, waits: dict[str, float], bound: float = 300.0, gpu: float = 200.0) -> Prediction:
    step = gpu + sum(waits.values())
    return Prediction(
        policy=policy,
        step_s=step,
        total_s=step * STEPS,
        change=step / 500 - 1,
        gpu_idle=1 - gpu / step,
        exposed_wait_s=sum(waits.values()),
        exposed_wait_by_cause=waits,
        lower_bound_s=bound * STEPS,
        bound_by="reward service",
        bounds_s={"GPU pool": gpu * STEPS, "reward service": bound * STEPS, "critical path": 250.0 * STEPS},
    )


WAITS = dict(zip(ROWS, (300.0, 220.0, 150.0, 130.0, 130.0), strict=True))
PLAN = [prediction(policy, {"rewards": s - 5, "start-up": 5.0}) for policy, s in WAITS.items()]


def swept(knob: str, values: Sequence[float], policies: Sequence[str] = ROWS) -> Sweep:
    rows = [tuple(prediction(p, {"rewards": WAITS[p] * values[0] / v}, 200 + 9 / v) for p in policies) for v in values]
    return Sweep(knob, tuple(values), tuple(rows))


SWEEPS = [swept("reward.concurrency", (64, 128, 256, 512)), swept("mini_batches", (1, 2, 4, 8, 16))]


def size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


class Page(HTMLParser):
    """What a page loads, and the data embedded in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.loads: list[str] = []
        self.embedded: dict[str, str] = {}
        self.title = ""
        self.heading = ""
        self._tag = self._id = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._tag, self._id = tag, dict(attrs).get("id") or ""
        self.loads += [value or "" for name, value in attrs if name in ("src", "href") and value != "data:,"]

    def handle_endtag(self, tag: str) -> None:
        self._tag = ""

    def handle_data(self, data: str) -> None:
        if self._tag == "script" and self._id:
            self.embedded[self._id] = self.embedded.get(self._id, "") + data
        if self._tag == "h1":
            self.heading += data
        if self._tag == "title":
            self.title += data

    def data(self, name: str) -> Any:
        """The data embedded in an element."""
        return json.loads(self.embedded[name])

    def models(self, kind: str, name: str = "") -> list[dict[str, Any]]:
        """The attributes of bokeh's models of a kind, those alone whose names begin with ``name``."""
        found: list[dict[str, Any]] = []

        def walk(value: Any) -> None:
            if isinstance(value, dict):
                attributes = value.get("attributes", {})
                if value.get("name") == kind and str(attributes.get("name", "")).startswith(name):
                    found.append(attributes)
                for each in value.values():
                    walk(each)
            elif isinstance(value, list):
                for each in value:
                    walk(each)

        walk(self.data("item"))
        return found

    def columns(self, name: str) -> list[dict[str, Any]]:
        """The columns that renderers of some name draw."""
        sources = [renderer["data_source"]["attributes"]["data"] for renderer in self.models("GlyphRenderer", name)]
        return [dict(source["entries"]) for source in sources]


def page(path: Path, rows: Sequence[Prediction] = PLAN, sweeps: Sequence[Sweep] = SWEEPS, title: str = "") -> Page:
    draw_plan(rows, sweeps, path, title)
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of the whole plan."""
    return page(tmp_path_factory.mktemp("drawn") / "plan.html", title="<a> & b")


@pytest.mark.slow
def test_a_png_is_1400_pixels_wide_and_grows_with_the_sweeps(tmp_path: Path) -> None:
    heights = []
    for sweeps in ([], [*SWEEPS, *SWEEPS]):
        path = tmp_path / "plan.png"
        draw_plan(PLAN, sweeps, str(path), "A plan")
        width, height = size(path)
        assert width == 1400
        heights.append(height)
    assert 300 < heights[0] < heights[1] < 1500
    assert [p.name for p in tmp_path.iterdir()] == ["plan.png"]


@pytest.mark.slow
def test_an_svg_names_what_it_shows(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    draw_plan(PLAN, SWEEPS, path, "predicted: $a_run$ <1>")
    text = path.read_text()
    said = {
        "predicted: $a_run$ &lt;1&gt;",
        "GPU work",
        "exposed wait: rewards",
        "exposed wait: start-up",
        "lower bound",
    }
    said |= {"500.0 s", "420.0 s (−16.0%)", "reward.concurrency", "seconds a step", "predicted seconds a step", "512"}
    squeezed = re.sub(r"\s+", " ", text)
    assert [word for word in (*said, *ROWS) if word not in squeezed] == []
    draw_plan(PLAN, SWEEPS, path, "predicted: $a_run$ <1>")
    assert path.read_text() == text


@pytest.mark.slow
def test_the_page_loads_nothing_and_names_what_it_shows(drawn: Page) -> None:
    assert drawn.loads == []
    assert drawn.title == "<a> & b"
    assert drawn.heading == "<a> & b"
    items = [item["label"]["value"] for item in drawn.models("LegendItem")]
    assert items == ["GPU work", "exposed wait: rewards", "exposed wait: start-up", "lower bound"]
    assert "420.0 s  (−16.0%)" in json.dumps(drawn.data("item"), ensure_ascii=False)
    hover = [text for columns in drawn.columns("markers-both") for text in columns["hover"] if "<b>both</b>" in text]
    assert len(hover) == 4 + 5
    assert hover[1].startswith("<b>both</b>, reward.concurrency = 128<br>265.0 s a step, −47.0% against baseline")


@pytest.mark.slow
def test_the_same_plan_gives_the_same_file(drawn: Page, tmp_path: Path) -> None:
    page(tmp_path / "plan.html", title="<a> & b")
    assert (tmp_path / "plan.html").read_text(encoding="utf-8") == drawn.text
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]


@pytest.mark.slow
def test_the_page_shows_every_policy_once_in_its_legend_and_every_second_of_a_step(drawn: Page) -> None:
    [switches] = drawn.models("CheckboxButtonGroup", "policies")
    assert switches["labels"] == [*ROWS, "lower bound"]
    assert switches["active"] == list(range(len(ROWS) + 1))
    bars = [columns["seconds"] for columns in drawn.columns("bar-")]
    assert [sum(parts) for parts in zip(*bars, strict=True)] == [row.step_s for row in PLAN]
    charts = drawn.models("Figure", "sweep-")
    assert [chart["y_range"]["attributes"].get("start", 0) for chart in charts] == [0, 0]
    axes = [axis for axis in drawn.models("LinearAxis", "sweep-") if axis["name"].endswith("-x")]
    ticks = [axis["ticker"]["attributes"]["ticks"] for axis in axes]
    assert ticks == [[6, 7, 8, 9], [0, 1, 2, 3, 4]]


@pytest.mark.slow
def test_every_colour_for_the_dark_belongs_to_one_model(drawn: Page) -> None:
    themed = drawn.data("themed")
    for name in {name for name, *_ in themed}:
        assert json.dumps(drawn.data("item")).count(f'"name": "{name}"') == 1
    assert len(themed) > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["svg", pytest.param("html", marks=pytest.mark.heavy)])
def test_odd_plans_are_drawn_too(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"plan.{kind}"
    nothing = prediction("both", {}, bound=0, gpu=1e-9)
    empty = Prediction("off-policy", 0.0, 0.0, 0.0, 0.0, 0.0, {}, 0.0, "critical path", {})
    own = prediction("split=4 staleness=1+stream", {f"a_resource_{i}": 20.0 * i for i in range(9)})
    for rows, sweeps in (
        ([empty], []),
        ([nothing, empty], [Sweep("reward.rpm", (1.5,), ((empty,),))]),
        ([own, *PLAN, prediction("baseline+stream", {}), prediction("$x_1$ & <y>", {})], []),
        (PLAN[:1], [Sweep("mini_batches", (4,), ((*PLAN, own, nothing),))]),
        (PLAN, [swept("reward.concurrency", [2**i for i in range(20)]), swept("mini_batches", range(1, 40))]),
    ):
        path.unlink(missing_ok=True)
        draw_plan(rows, sweeps, path)
        assert path.stat().st_size > 1000


def test_what_cannot_be_drawn_is_said_and_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"plan\.gif: no such kind, '\.gif'; give a name in \.png, \.svg or \.html\."):
        draw_plan(PLAN, [], tmp_path / "plan.gif")
    for kind in ("png", "svg", "html"):
        with pytest.raises(DataError, match="there is no policy to draw"):
            draw_plan([], SWEEPS, tmp_path / f"plan.{kind}")
        for sweep in (Sweep("reward.rpm", (), ()), Sweep("reward.rpm", (1.0,), ((),))):
            with pytest.raises(DataError, match=r"no prediction for a value of reward\.rpm"):
                draw_plan(PLAN, [sweep], tmp_path / f"plan.{kind}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["png", "html"])
def test_a_picture_that_fails_half_way_leaves_the_old_one(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / f"plan.{kind}"
    path.write_text("old")

    def fail(self: Path, target: Path) -> Path:
        assert self.stat().st_size > 1000
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        draw_plan(PLAN, SWEEPS, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_bars_add_up_what_is_too_small_to_see() -> None:
    small = {f"cause {i}": 1.0 for i in range(5)}
    bars = Bars([prediction("baseline", {"rewards": 300.0, **small}), prediction("both", {"rewards": 30.0})])
    assert [what for what, _ in bars.parts] == ["GPU work", "rewards", "other"]
    assert bars.parts[2][1] == pytest.approx([5.0, 0.0])
    assert bars.bounds == [300.0, 300.0]
    assert bars.labels[0] == "505.0 s"


def test_a_bound_that_policies_share_is_drawn_once() -> None:
    shared = Panel(swept("reward.concurrency", (64, 128, 256))).bounds()
    assert list(shared) == [""]
    assert len(shared[""]) == 1
    assert [x for x, _ in shared[""][0]] == [6, 7, 8]


def test_bounds_that_part_are_drawn_apart_from_there_on() -> None:
    values = (1.0, 2.0, 4.0, 8.0)
    rows = []
    for v in values:
        bounds = {"a": max(300 / v, 140), "b": 300 / v, "c": 300 / v}
        rows.append(tuple(prediction(name, {"rewards": 100.0}, bound) for name, bound in bounds.items()))
    drawn = Panel(Sweep("reward.rpm", values, tuple(rows))).bounds()
    assert drawn["a"] == [[(1, 150), (2, 140), (3, 140)]]
    assert drawn[""] == [[(0, 300), (1, 150), (2, 75), (3, 37.5)]]
    alone = Panel(Sweep("reward.rpm", (4.0,), (rows[2],))).bounds()
    assert [[y for _, y in line] for name in ("", "a") for line in alone[name]] == [[75, 75], [140, 140]]


def test_markers_that_would_hide_each_other_stand_side_by_side() -> None:
    panel = Panel(swept("reward.concurrency", (64, 128)))
    baseline, mini_batch, off_policy, both, stream = panel.beside(6.0)
    assert panel.crowded
    assert baseline == mini_batch == off_policy == panel.places
    assert [(a + b) / 2 for a, b in zip(both, stream, strict=True)] == pytest.approx(panel.places)
    assert all(a < b for a, b in zip(both, stream, strict=True))
    assert not Panel(swept("reward.concurrency", (64, 128), ROWS[:3])).crowded


@pytest.mark.slow
def test_importing_it_loads_no_picture_library() -> None:
    heavy = ("matplotlib", "bokeh")
    names = "dataflow.planning.drawing.picture, dataflow.planning.drawing.page"
    code = f"import sys, {names}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]"
