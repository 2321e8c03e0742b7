"""The page in a browser: display, pointing and switches. Offline, and without output on the console."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.samples.page import page as samples_page
from dataflow.timeline.causes import linked
from dataflow.timeline.page import page
from dataflow.timeline.spans import Span, Trace
from tests.rigs import chromium
from tests.rigs.made_up import made_up

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]

if chromium.path() is None:
    pytest.skip("no Chromium: install one, or name it in DATAFLOW_CHROMIUM", allow_module_level=True)
if importlib.util.find_spec("playwright") is None:
    pytest.skip("no playwright: install the extra 'dev'", allow_module_level=True)

EVIL = "<img src=x onerror=alert(1)>"
RANGE = "[timeline.view.from, timeline.view.to]"

Open = Callable[..., Any]


def run() -> Trace:
    """Three steps, with a stage of a user's own."""
    trace = made_up(3, requests=2, seed=2)
    trace.add(Span(EVIL, 2, 0, 1, "io", 2.0, 3.0, {"files": 7, EVIL: "<b>bold</b>"}))
    return trace


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium.browser() as found:
        yield found


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens pages; fails if one says anything on the console or asks for anything outside itself."""
    said: list[str] = []
    asked: list[str] = []
    contexts = []

    def show(traces: Any, scheme: str = "light", wide: int = 1400, **more: Any) -> Any:
        path = tmp_path / "page.html"
        page(traces, path, **more)
        context = browser.new_context(color_scheme=scheme, viewport={"width": wide, "height": 900})
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(20_000)
        tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: said.append(f"error: {error}"))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready=yes]")
        return tab

    yield show
    for context in contexts:
        context.close()
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def point_at(tab: Any, layer: str, row: int = 0) -> str:
    """Points at the middle of what a layer has; returns its tooltip."""
    x, y = tab.evaluate(
        """([layer, row]) => {
          const { x, y, top, bottom } = timeline.data[layer][row]
          const box = document.getElementById("chart").getBoundingClientRect()
          return Array.isArray(x) ? [box.x + timeline.place((x[0] + x[1]) / 2), box.y + (y[0] + y[1]) / 2]
            : [box.x + timeline.place(x), box.y + (top + bottom) / 2]
        }""",
        [layer, row],
    )
    tab.mouse.move(x - 2, y)
    tab.mouse.move(x, y)
    return str(tab.locator("#tip:visible").inner_text())


def row_of(tab: Any, layer: str, name: str, value: str) -> int:
    row: int = tab.evaluate("([l, n, v]) => timeline.data[l].findIndex((item) => item[n] === v)", [layer, name, value])
    return row


def until(tab: Any, condition: str) -> None:
    tab.wait_for_function(condition)


def test_pointing_says_what_is_known_as_text(opened: Open) -> None:
    tab = opened(run(), title=EVIL)
    told = point_at(tab, "bars", row_of(tab, "bars", "task", "actor_update[2.1]"))
    for word in ("actor_update[2.1]", "took", "began", "advantage[2.1]"):
        assert word in told
    told = point_at(tab, "waits", row_of(tab, "waits", "cause", "rewards"))
    assert told.startswith("gpu waits for rewards")
    assert "group" in told
    assert "opens its text" not in told
    told = point_at(tab, "bars", row_of(tab, "bars", "stage", EVIL))
    assert told.startswith(f"{EVIL}[2]")
    assert "<b>bold</b>" in told
    assert tab.locator("img").count() == 0
    assert tab.locator("h1").inner_text() == EVIL


def test_a_click_on_a_wait_opens_the_text_that_was_waited_for(opened: Open, tmp_path: Path) -> None:
    trace = run()
    rows = [
        {"step": step, "group": group, "sample": 0, "prompt": "p", "response": f"said {step}.{group}", "score": 1.0}
        for step, group in linked(trace)
    ]
    samples_page(rows, tmp_path / "samples.html", "run")
    tab = opened({"both": trace}, facts={"both": {"samples": "samples.html"}})
    tab.locator("button.go").first.click()
    shown = tab.evaluate("timeline.data.waits[0].address")
    assert "opens its text" in point_at(tab, "waits")
    with tab.expect_popup() as popup:
        tab.mouse.down()
        tab.mouse.up()
    text = popup.value
    text.wait_for_load_state()
    assert text.url.endswith(shown)
    assert "said " in text.locator("tr.whole").inner_text()
    link = tab.locator("a.text").last
    link.click()  # the same tab shows it
    text.wait_for_url("**/" + str(link.get_attribute("href")))
    assert text.locator("tr.whole").count() == 1
    assert len(tab.context.pages) == 2
    text.evaluate("location.hash = 'step-99-group-1'")
    text.get_by_text("Step 99, group 1 is not on this page").wait_for()


def test_the_critical_path_is_shown(opened: Open) -> None:
    tab = opened(run())
    before = tab.locator("#chart").screenshot()
    tab.get_by_label("critical path").check()
    tab.wait_for_timeout(100)
    assert tab.locator("#chart").screenshot() != before
    assert tab.evaluate("[timeline.data.path[0].task, timeline.data.path.at(-1).task]") == [
        "rollout[1]",
        "sync_weights[3]",
    ]


def test_wheel_keys_and_buttons_zoom_and_move_a_long_run(opened: Open) -> None:
    tab = opened(made_up(589))
    whole = tab.evaluate(RANGE)
    assert tab.evaluate("timeline.seen.bars.length") == tab.evaluate("timeline.data.bars.length")
    tab.locator("#chart").hover()
    for _ in range(12):
        tab.mouse.wheel(0, -300)
    until(tab, "timeline.view.to - timeline.view.from < 20")
    until(tab, "timeline.seen.labels.some((label) => label.includes('.'))")
    near, far = tab.evaluate(RANGE)
    tab.mouse.down()
    tab.mouse.move(500, 200)
    tab.mouse.up()
    assert tab.evaluate(RANGE) != [near, far]
    tab.keyboard.press("0")
    assert tab.evaluate(RANGE) == whole
    tab.mouse.move(2, 2)
    tab.keyboard.press("w")
    tab.keyboard.press("w")
    near, far = tab.evaluate(RANGE)
    assert far - near == pytest.approx(whole[1] * 0.75**2)
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(RANGE)[0] > near
    tab.keyboard.press("a")
    assert tab.evaluate(RANGE)[0] == pytest.approx(near)
    tab.locator("button.go").first.click()
    until(tab, "timeline.view.to - timeline.view.from < 20")
    causes = set(tab.evaluate("timeline.data.causes"))
    until(tab, "timeline.seen.labels.some((label) => label.includes(' '))")
    assert {words.split()[0] for words in tab.evaluate("timeline.seen.labels") if " " in words} <= causes


def test_light_and_dark_look_different(opened: Open) -> None:
    shots = [opened(run(), scheme).screenshot() for scheme in ("light", "dark")]
    assert shots[0] != shots[1]
