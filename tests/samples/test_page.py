"""The page of samples in a browser: sorted, filtered, searched and opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from dataflow.samples.page import page
from tests.rigs import chromium

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(90)]

if chromium.path() is None:
    pytest.skip("no Chromium: install one, or name it in DATAFLOW_CHROMIUM", allow_module_level=True)
if importlib.util.find_spec("playwright") is None:
    pytest.skip("no playwright: install the extra 'dev'", allow_module_level=True)

EVIL = "<img src=x onerror=alert(1)>"
ROWS: list[dict[str, Any]] = [
    {
        "step": step,
        "group": group,
        "sample": sample,
        "prompt": f"What is {group} + {step}?",
        "response": f"It is {group}{sample}. {EVIL}",
        "score": (group + sample) / 3,
        "latency_s": None if group == 2 else 10.0 - group - 5 * sample,
        "truncated": sample == 1,
        "explanation": "off by one" if sample else '"right"',
    }
    for step in (1, 2)
    for group in range(3)
    for sample in range(2)
]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    place = tmp_path_factory.mktemp("page") / "samples.html"
    page(ROWS, place, "run")
    said: list[str] = []
    with chromium.browser() as browser:
        tab = browser.new_page()
        tab.on("console", lambda message: said.append(message.text))
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.goto(place.as_uri())
        yield tab
    assert said == []


def shown(tab: Any) -> list[tuple[int, int, int]]:
    """The step, group and sample of what can be seen, from top to bottom."""
    found = tab.evaluate(
        """() => [...document.querySelectorAll("tr.sample")].map(
          (row) => [0, 1, 2].map((i) => Number(row.cells[i].textContent)))"""
    )
    return [(step, group, sample) for step, group, sample in found]


def keys(**conditions: Any) -> list[tuple[int, int, int]]:
    rows = [row for row in ROWS if all(row[name] == value for name, value in conditions.items())]
    return [(row["step"], row["group"], row["sample"]) for row in rows]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({"score": "<0.5", "step": "=1"}, [(1, 0, 0), (1, 0, 1), (1, 1, 0)]),
        ({"latency_s": ">=9", "step": "2"}, [(2, 0, 0), (2, 1, 0)]),
        ({"explanation": "OFF by"}, keys(sample=1)),
        ({"response": f"0. {EVIL}", "group": "=1"}, keys(group=1, sample=0)),
    ],
)
def test_boxes_filter(tab: Any, filters: dict[str, str], expected: list[tuple[int, int, int]]) -> None:
    tab.get_by_role("button", name="clear").click()
    for name, text in filters.items():
        tab.get_by_label(f"filter {name}").fill(text)
    assert shown(tab) == expected
    assert tab.inner_text("#count") == f"{len(expected)} of {len(ROWS)} samples"


def test_words_are_searched_in_all_texts_and_a_name_sorts(tab: Any) -> None:
    tab.get_by_role("button", name="clear").click()
    tab.fill("#search", "OFF is 21.")
    assert shown(tab) == [(1, 2, 1), (2, 2, 1)]
    tab.fill("#search", "")
    tab.get_by_label("filter step").fill("=1")
    tab.locator("th[data-name=latency_s]").click()
    assert shown(tab) == [(1, 1, 1), (1, 0, 1), (1, 1, 0), (1, 0, 0), (1, 2, 0), (1, 2, 1)]
    tab.locator("th[data-name=latency_s]").click()
    assert shown(tab) == [(1, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1), (1, 2, 0), (1, 2, 1)]


def test_a_row_opens_and_an_address_shows_a_group(tab: Any) -> None:
    tab.get_by_role("button", name="clear").click()
    tab.locator("tr.sample").first.click()
    assert EVIL in tab.inner_text("tr.whole")
    tab.evaluate("location.hash = 'step-2-group-1'")
    tab.get_by_text("2 of 12 samples").wait_for()
    assert set(shown(tab)) == {(2, 1, 0), (2, 1, 1)}
    assert tab.locator("tr.whole").count() == 2
    tab.evaluate("location.hash = 'step-9-group-1'")
    tab.get_by_text("Step 9, group 1 is not on this page").wait_for()
