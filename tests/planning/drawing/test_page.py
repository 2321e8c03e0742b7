"""The plan's page in a browser: offline, without errors, in light and dark; hover and switches work."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.planning.drawing.picture import draw_plan
from tests.planning.drawing.test_picture import PLAN, SWEEPS
from tests.rigs import chromium

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]

if chromium.path() is None:
    pytest.skip("no Chromium: install one, or name it in DATAFLOW_CHROMIUM", allow_module_level=True)
if importlib.util.find_spec("playwright") is None:
    pytest.skip("no playwright: install the extra 'dev'", allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium.browser() as found:
        yield found


@pytest.fixture
def tab(browser: Any, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """The page of a plan; fails if it logs an error or loads anything."""
    path = tmp_path / "plan.html"
    draw_plan(PLAN, SWEEPS, path, "a plan")
    errors: list[str] = []
    requests: list[str] = []
    context = browser.new_context(color_scheme=request.param, viewport={"width": 1400, "height": 900})
    try:
        tab = context.new_page()
        tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda made: requests.append(made.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready=yes]")
        yield tab
    finally:
        context.close()
    assert errors == []
    assert [url for url in requests if not url.startswith(("file:", "data:", "blob:"))] == []


def ink(tab: Any) -> str:
    """The colour of the bars' labels."""
    return str(tab.evaluate("Bokeh.documents[0].get_model_by_name('labels').text_color.value"))


@pytest.mark.parametrize("tab", ["light"], indirect=True)
def test_pointing_at_a_bar_shows_its_seconds(tab: Any) -> None:
    # Near the left end of a row there is the bar of GPU work.
    box = tab.locator(".bk-Figure").first.bounding_box()
    tab.mouse.move(box["x"] + 250, box["y"] + 60)
    tab.get_by_text("GPU work: 200.0 s").wait_for()
    assert ink(tab) == "#222222"
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_function("Bokeh.documents[0].get_model_by_name('labels').text_color.value === '#E4E4E4'")


@pytest.mark.parametrize("tab", ["dark"], indirect=True)
def test_a_button_switches_a_policy_off_in_all_panels(tab: Any) -> None:
    assert ink(tab) == "#E4E4E4"
    visible = (
        "Array.from(Bokeh.documents[0]._all_models.values())"
        ".filter((model) => model.name === 'markers-both').map((model) => model.visible)"
    )
    assert tab.evaluate(visible) == [True, True]
    tab.get_by_text("both", exact=True).click()
    assert tab.evaluate(visible) == [False, False]


LABELS = """() => {
  const find = (name) => Bokeh.documents[0].get_model_by_name(name)
  const bars = Bokeh.index.find_one_by_id(find("bars").id), ends = find("bar-ends").data
  const pen = document.createElement("canvas").getContext("2d")
  pen.font = "13px Helvetica, Arial, sans-serif"
  const right = bars.frame.bbox.right
  return ends.x.map((x, i) => right - bars.frame.x_scale.compute(x) - 8 - pen.measureText(ends.text[i]).width)
}"""
"""Pixels between the label of each bar and the right end of the chart."""


@pytest.mark.parametrize("tab", ["light"], indirect=True)
def test_on_a_narrow_screen_sweeps_are_stacked_and_nothing_is_cut(tab: Any) -> None:
    tab.set_viewport_size({"width": 480, "height": 900})
    tab.wait_for_function("Bokeh.documents[0].get_model_by_name('bars').inner_width < 480")
    tab.wait_for_function(f"Math.min(...({LABELS})()) >= 0")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 480
    bars, *sweeps = (tab.locator(".bk-Figure").nth(i).bounding_box() for i in range(len(SWEEPS) + 1))
    for above, below in itertools.pairwise([bars, *sweeps]):
        assert below["y"] >= above["y"] + above["height"] - 1
        assert below["width"] > 400
    # A chart that is clicked gets no frame, and one that is reached by Tab keeps its own.
    frame = """() => { const chart = Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name("bars").id)
      return getComputedStyle(chart.canvas_view.events_el).outlineStyle }"""
    tab.mouse.click(bars["x"] + 200, bars["y"] + 60)
    assert tab.evaluate(frame) == "none"
    tab.keyboard.press("Tab")
    tab.keyboard.press("Shift+Tab")
    assert tab.evaluate(frame) == "dotted"
