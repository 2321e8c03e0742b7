"""The page in a browser: display, pointing and switches. Offline, and without output on the console."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.samples.page import page as samples_page
from dataflow.timeline.causes.culprits import linked
from dataflow.timeline.page.html import page
from dataflow.timeline.spans import Span, Trace
from tests.rigs import chromium
from tests.rigs.made_up import made_up
from tests.timeline.traces.resumed import WHY, resumed

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]

if chromium.path() is None:
    pytest.skip("no Chromium: install one, or name it in DATAFLOW_CHROMIUM", allow_module_level=True)
if importlib.util.find_spec("playwright") is None:
    pytest.skip("no playwright: install the extra 'dev'", allow_module_level=True)

EVIL = "<img src=x onerror=alert(1)>"
WAIT_MS = 20_000
SHOWN_SPANS = "timeline.model('spans-shown').indices"

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
        tab.set_default_timeout(WAIT_MS)
        tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        tab.on("pageerror", lambda error: said.append(f"error: {error}"))
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-ready=yes]")
        return tab

    yield show
    for context in contexts:
        context.close()
    assert [s for s in said if s.startswith(("error", "warning"))] == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []


def data(tab: Any, name: str, column: str) -> list[Any]:
    """A column of a source, as the browser has it."""
    return list(tab.evaluate("([n, c]) => Array.from(timeline.columns(n)[c])", [name, column]))


def shown(tab: Any, name: str) -> int:
    """How many of a source's rows the filters let through."""
    count: int = tab.evaluate(
        "n => (timeline.model(n + '-shown').indices ?? timeline.model(n).data.begin ?? []).length", name
    )
    return count


def spot(tab: Any, x: float, y: float) -> tuple[float, float]:
    """Where on the screen a second and a pixel of the chart are."""
    at = tab.evaluate(
        """([x, y]) => {
          const view = Bokeh.index.find_one_by_id(timeline.model("chart").id)
          const box = view.el.getBoundingClientRect()
          return [box.x + view.frame.x_scale.compute(x), box.y + view.frame.y_scale.compute(y)]
        }""",
        [x, y],
    )
    return at[0], at[1]


def point_at(tab: Any, name: str, row: int, column: str = "begin") -> str:
    """Points at the middle of a bar; returns its tooltip."""
    begin, end = data(tab, name, "begin")[row], data(tab, name, "end")[row]
    if name == "requests":
        y = data(tab, name, "y")[row]
    else:
        y = (data(tab, name, "top")[row] + data(tab, name, "bottom")[row]) / 2
    x, y = spot(tab, (begin + end) / 2, y)
    tab.mouse.move(x - 2, y)
    tab.mouse.move(x, y)
    tips = tab.locator(".bk-tooltip-content:visible")
    tips.first.locator("b").wait_for()
    return "\n\n".join(tips.all_inner_texts())


def until(tab: Any, condition: str) -> None:
    tab.wait_for_function(condition, timeout=WAIT_MS)


def test_pointing_at_a_task_a_wait_or_a_request_says_what_is_known(opened: Open) -> None:
    trace = run()
    tab = opened(trace)
    update = next(i for i, s in enumerate(trace.spans) if s.task == "actor_update[2.1]")
    shown_text = point_at(tab, "spans", data(tab, "spans", "begin").index(trace.spans[update].begin))
    for word in ("actor_update[2.1]", "took", "began", "weights version", "staleness", "advantage[2.1]"):
        assert word in shown_text
    rewards = data(tab, "waits", "cause").index("rewards")
    shown_text = point_at(tab, "waits", rewards)
    assert "gpu waits for rewards" in shown_text
    assert "step" in shown_text
    assert "group" in shown_text
    shown_text = point_at(tab, "requests", 0)
    assert "slowest request: step 1, group" in shown_text
    assert "led to" in shown_text


def test_the_chart_comes_before_its_buttons(opened: Open) -> None:
    tab = opened(run())
    top = "n => Bokeh.index.find_one_by_id(timeline.model(n).id).el.getBoundingClientRect().y"
    tops = [tab.evaluate(top, name) for name in ("chart", "stages", "shown")]
    assert tops == sorted(tops)


def test_a_click_on_a_slow_group_opens_its_text(opened: Open, tmp_path: Path) -> None:
    trace = run()
    rows = [
        {"step": step, "group": group, "sample": 0, "prompt": "p", "response": f"said {step}.{group}", "score": 1.0}
        for step, group in linked(trace)
    ]
    samples_page(rows, tmp_path / "samples.html", "run")
    tab = opened({"both": trace}, facts={"both": {"samples": "samples.html"}})
    assert "opens its text" in point_at(tab, "requests", 0)
    step, group = data(tab, "requests", "step")[0], data(tab, "requests", "group")[0]
    with tab.expect_popup() as popup:
        tab.mouse.down()
        tab.mouse.up()
    text = popup.value
    text.wait_for_load_state()
    assert text.url.endswith(f"samples.html#step-{step}-group-{group}")
    assert f"said {step}.{group}" in text.locator("tr.whole").inner_text()
    link = tab.locator("a.text").last
    link.click()  # the same tab shows it
    text.wait_for_url("**/" + str(link.get_attribute("href")))
    assert text.locator("tr.whole").count() == 1
    assert len(tab.context.pages) == 2
    text.evaluate("location.hash = 'step-99-group-1'")
    text.get_by_text("Step 99, group 1 is not on this page").wait_for()


def test_a_page_without_samples_opens_nothing(opened: Open) -> None:
    tab = opened(run())
    assert "opens its text" not in point_at(tab, "requests", 0)
    tab.mouse.down()
    tab.mouse.up()
    assert tab.locator("a.text").count() == 0
    assert len(tab.context.pages) == 1


def test_names_from_a_trace_are_text(opened: Open) -> None:
    tab = opened({EVIL: run(), "$$x^2$$": run()}, title=EVIL)
    own = data(tab, "spans", "stage").index(run().stages.index(EVIL))
    shown_text = point_at(tab, "spans", own)
    assert f"{EVIL}[2]" in shown_text
    assert "<b>bold</b>" in shown_text
    assert tab.locator("img").count() == 0
    assert tab.locator("h1").inner_text() == EVIL


def test_steps_and_stages_are_filtered(opened: Open) -> None:
    trace = run()
    tab = opened(trace)
    tab.evaluate("timeline.model('steps-range').value = [2, 2]")
    assert shown(tab, "spans") == sum(s.step == 2 for s in trace.spans)
    begin, end = tab.evaluate("[timeline.model('seconds-range').start, timeline.model('seconds-range').end]")
    of = [s for s in trace.spans if s.step == 2]
    assert begin <= min(s.begin for s in of)
    assert end >= max(s.end for s in of)
    assert end - begin < trace.wall * 0.9
    tab.evaluate("timeline.model('steps-range').value = [1, 3]")
    tab.get_by_text("actor_update", exact=True).first.click()
    until(
        tab, f"timeline.model('spans-shown').indices.length === {sum(s.stage != 'actor_update' for s in trace.spans)}"
    )
    tab.get_by_text("actor_update", exact=True).first.click()
    until(tab, f"timeline.model('spans-shown').indices.length === {len(trace.spans)}")


def test_the_critical_path_can_be_switched_on(opened: Open) -> None:
    tab = opened(run())
    assert tab.evaluate("timeline.model('path-span').visible") is False
    tab.get_by_text("critical path", exact=True).first.click()
    until(tab, "timeline.model('path-span').visible")
    assert tab.evaluate("timeline.model('span-glyph').fill_alpha") != 1
    names = data(tab, "path", "task")
    assert names[0] == "rollout[1]"
    assert names[-1] == "sync_weights[3]"
    tab.get_by_text("exposed waits", exact=True).first.click()
    until(tab, "!timeline.model('wait').visible")


def test_labels_come_as_one_zooms_in_and_the_range_is_kept_in_bounds(opened: Open) -> None:
    tab = opened(made_up(60))
    before = data(tab, "labels", "text")
    x, y = spot(tab, 40.0, 60.0)
    tab.mouse.move(x, y)
    for _ in range(12):
        tab.mouse.wheel(0, -300)
    until(tab, "timeline.model('seconds-range').end - timeline.model('seconds-range').start < 40")
    until(tab, "timeline.model('labels').data.text.some((t) => t.includes('.'))")
    after = data(tab, "labels", "text")
    assert set(after) - set(before)
    wide = "timeline.model('seconds-range').end - timeline.model('seconds-range').start"
    narrow = tab.evaluate(wide)
    tab.locator("button.go").first.click()
    until(tab, f"{wide} !== {narrow}")


def test_light_and_dark_look_different(opened: Open) -> None:
    looks = {}
    for scheme in ("light", "dark"):
        tab = opened(run(), scheme)
        shot = tab.screenshot()
        looks[scheme] = (
            hashlib.sha256(shot).hexdigest(),
            tab.evaluate("getComputedStyle(document.body).backgroundColor"),
        )
    assert looks["light"][0] != looks["dark"][0]
    assert looks["light"][1] == "rgb(255, 255, 255)"
    assert looks["dark"][1] != "rgb(255, 255, 255)"


def test_a_long_run_opens_and_answers(opened: Open) -> None:
    trace = made_up(589)
    tab = opened(trace)
    assert shown(tab, "spans") == len(trace.spans)
    assert len(data(tab, "labels", "text")) < 2000
    tab.evaluate("timeline.model('steps-range').value = [100, 102]")
    until(tab, "timeline.model('labels').data.text.includes('101.1')")
    tab.evaluate("timeline.model('steps-range').value = [1, 589]")
    until(tab, f"timeline.model('spans-shown').indices.length === {len(trace.spans)}")
    tab.evaluate("timeline.model('seconds-range').setv({start: 300, end: 310})")
    until(tab, "timeline.model('spans-shown').indices.length < 300")  # no more bars than near those that one sees
    begin, end, kept = data(tab, "spans", "begin"), data(tab, "spans", "end"), set(tab.evaluate(SHOWN_SPANS))
    assert kept >= {i for i in range(len(begin)) if begin[i] < 310 and end[i] > 300}
    tab.keyboard.press("0")
    until(tab, f"timeline.model('spans-shown').indices.length === {len(trace.spans)}")


def test_several_runs_stand_below_each_other(opened: Open) -> None:
    runs = {"baseline": made_up(4), "both": made_up(4, seed=5), "predicted": made_up(4, seed=6)}
    tab = opened(runs, facts={"both": {"accuracy_before": 0.1, "accuracy_after": 0.9}})
    table = tab.locator(".compared table").inner_text()
    for word in ("baseline", "both", "predicted", "0.100 → 0.900", "%"):
        assert word in table
    assert tab.locator("section.panel").count() == 3
    shown_text = point_at(tab, "spans", next(i for i, r in enumerate(data(tab, "spans", "run")) if r == 1))
    assert "both: rollout[1]" in shown_text


def test_a_downtime_is_cut_out_of_the_axis_and_tells_of_itself(opened: Open) -> None:
    tab = opened({"plain": resumed(killed=False), "resumed": resumed()})
    words = "not running 3 h 12 min, resumed from step 2"
    assert tab.evaluate("timeline.model('cuts').data.text") == [words]
    assert tab.evaluate("timeline.model('seconds-range').end") < 40
    (top,), (bottom,) = data(tab, "downtimes", "top"), data(tab, "downtimes", "bottom")
    tab.mouse.move(*spot(tab, 26, (top + bottom) / 2))
    tab.get_by_text(words).first.wait_for()
    tab.get_by_text(WHY).first.wait_for()


INNERMOST = (
    "((on) => { while (on.shadowRoot?.activeElement) on = on.shadowRoot.activeElement; return on })"
    "(document.activeElement)"
)
"""What has the focus, in whichever shadow tree."""
RANGE = "[timeline.model('seconds-range').start, timeline.model('seconds-range').end]"


def test_keys_steer_the_chart_and_tab_reaches_the_switches(opened: Open) -> None:
    tab = opened(made_up(6, requests=2))
    begin, end = tab.evaluate(RANGE)
    tab.keyboard.press("w")
    tab.keyboard.press("w")
    near, far = tab.evaluate(RANGE)
    assert far - near == pytest.approx((end - begin) * 0.75**2)
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(RANGE)[0] > near
    tab.keyboard.press("a")
    assert tab.evaluate(RANGE)[0] == pytest.approx(near)
    tab.keyboard.press("s")
    tab.keyboard.press("0")
    assert tab.evaluate(RANGE) == [begin, end]
    assert tab.locator("#keys").is_hidden()
    tab.keyboard.press("?")
    tab.get_by_text("zoom in and out").wait_for()
    tab.keyboard.press("w")  # the dialog has the keys
    tab.keyboard.press("Escape")
    assert tab.locator("#keys").is_hidden()
    assert tab.evaluate(RANGE) == [begin, end]
    tab.keyboard.press("Tab")
    for _ in range(40):
        if tab.evaluate(f"{INNERMOST}.textContent") == "critical path":
            break
        tab.keyboard.press("Tab")
    assert tab.evaluate(f"{INNERMOST}.getAttribute('aria-pressed')") == "false"
    tab.keyboard.press("Space")
    until(tab, "timeline.model('path-span').visible")
    assert tab.evaluate(f"{INNERMOST}.getAttribute('aria-pressed')") == "true"


def test_arrows_are_those_of_what_is_pointed_at_and_stay_inside_the_plot(opened: Open) -> None:
    trace = made_up(6, requests=2)
    tab = opened(trace)
    arrows = "timeline.model('leads-shown').indices"
    assert tab.evaluate(arrows) == []
    point_at(tab, "requests", 0)
    until(tab, f"{arrows}.length === 1")
    led = data(tab, "requests", "task")[0]
    begin = next(span.begin for span in trace.spans if span.task == led)
    point_at(tab, "spans", data(tab, "spans", "begin").index(begin))
    until(tab, f"{arrows}.length === 1 && timeline.columns('requests').task[{arrows}[0]] === '{led}'")
    tab.mouse.move(2, 2)
    until(tab, f"{arrows}.length === 0")
    tab.evaluate("timeline.model('seconds-range').setv({start: 6, end: 7})")
    tab.evaluate("timeline.model('chart').toolbar.tools.forEach((tool) => { tool.active = false })")
    left, top = spot(tab, 6, 0)
    right, bottom = spot(tab, 7, tab.evaluate("timeline.model('pixels-range').start"))
    wide = tab.evaluate("innerWidth")

    def beside() -> list[bytes]:
        tab.wait_for_timeout(200)  # two frames, on a busy machine
        sides = ((0, left - 2), (right + 2, wide - right - 2))
        return [tab.screenshot(clip={"x": x, "y": top, "width": w, "height": bottom - top}) for x, w in sides]

    before = beside()
    tab.get_by_text("all arrows", exact=True).first.click()
    until(tab, f"{arrows}.length > 1")
    tab.mouse.move(2, 2)
    assert beside() == before


def test_gaps_name_their_cause_and_a_narrow_screen_needs_no_scrolling(opened: Open) -> None:
    tab = opened({"a": run(), "b": run()}, wide=480)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 480
    wide, box, shades = tab.locator(".compared .scroll").evaluate(
        "(box) => [box.scrollWidth, box.clientWidth,"
        " getComputedStyle(box).backgroundImage.split('linear-gradient').length]"
    )
    assert wide > box, "the table scrolls in its box, whose sides are shaded"
    assert shades == 5
    longest = max(zip(data(tab, "waits", "begin"), data(tab, "waits", "end"), strict=True), key=lambda w: w[1] - w[0])
    tab.evaluate("([start, end]) => timeline.model('seconds-range').setv({start, end})", list(longest))
    until(tab, "timeline.model('gaps').data.text.length > 0")
    waits = set(data(tab, "waits", "cause"))
    assert {text.split()[0] for text in tab.evaluate("timeline.model('gaps').data.text")} <= waits
    assert tab.locator(".legend").inner_text().split("\n")[0].startswith("waits for")
    tab.get_by_text("exposed waits", exact=True).first.click()
    until(tab, "timeline.model('gaps').data.text.length === 0")
