"""The page of samples in a browser: sorted, filtered and searched, as the command does it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.samples.page import page
from dataflow.samples.query import select
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
        "ground_truth": str(group + step),
        "data_source": "gsm8k",
        "response": f"It is {group}{sample}. {EVIL}",
        "score": (group + sample) / 3,
        "latency_s": None if group == 2 else 10.0 - group - 5 * sample,
        "tries": 1 + group,
        "truncated": sample == 1,
        "failed_tries": "HTTP 429, 2 s" if group else None,
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


@pytest.fixture(autouse=True)
def _anew(tab: Any) -> None:
    for name in ("#search", "#where"):
        tab.fill(name, "")
    tab.select_option("#sort", "")
    tab.uncheck("#falling")


def shown(tab: Any) -> list[tuple[int, int, int]]:
    """The step, group and sample of what can be seen, from top to bottom."""
    found = tab.evaluate(
        """() => [...document.querySelectorAll("section.group:not([hidden]) tbody tr:not([hidden])")].map((row) =>
          [...row.closest("section").id.match(/\\d+/g), row.cells[0].textContent].map(Number))"""
    )
    return [(step, group, sample) for step, group, sample in found]


def ids(rows: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    return [(row["step"], row["group"], row["sample"]) for row in rows]


@pytest.mark.parametrize(
    "where",
    [
        "score<0.5",
        "score = 0.6666666666666666",
        "step=2 and tries >= 2",
        "latency>4",
        "latency_s=null",
        "latency_s!=null",
        "latency_s!=5",
        "failed_tries = NULL",
        "failed_tries ~ '429, 2'",
        "explanation='\"right\"'",
        "explanation != 'off by one'",
        "truncated=true",
        "prompt~'WHAT is 1' and ground_truth=3",
        f"response~'0. {EVIL}' and data_source=gsm8k",
        "sample=1 and group==0",
    ],
)
def test_a_filter_means_what_it_does_on_the_command_line(tab: Any, where: str) -> None:
    tab.fill("#where", where)
    expected = ids(select(ROWS, where, None))
    assert shown(tab) == expected
    assert 0 < len(expected) < len(ROWS)
    assert tab.inner_text("#count").startswith(f"{len(expected)} samples in ")


@pytest.mark.parametrize("where", ["scores<1", "score<", "score<high", "explanation>1", "score<1 or tries=1"])
def test_what_is_no_filter_is_said(tab: Any, where: str) -> None:
    with pytest.raises(ConfigError):
        select(ROWS, where, None)
    tab.fill("#where", where)
    assert "note" in tab.get_attribute("#count", "class")
    assert tab.inner_text("#count").endswith(".")


def test_words_are_searched_in_all_texts(tab: Any) -> None:
    tab.fill("#search", "OFF is 21.")
    assert shown(tab) == [(1, 2, 1), (2, 2, 1)]
    tab.fill("#where", "step=2")
    assert shown(tab) == [(2, 2, 1)]


def test_groups_stand_where_their_first_sample_would(tab: Any) -> None:
    tab.fill("#where", "step=1")
    tab.select_option("#sort", "latency_s")
    assert shown(tab) == [(1, 1, 1), (1, 1, 0), (1, 0, 1), (1, 0, 0), (1, 2, 0), (1, 2, 1)]
    tab.check("#falling")
    assert shown(tab) == [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (1, 2, 0), (1, 2, 1)]
    tab.fill("#where", "step=1 and sample=1 and score<0.5")
    tab.locator("section:not([hidden]) th[data-name=score]").first.click()
    assert tab.input_value("#sort") == "score"
    assert shown(tab) == [(1, 0, 1)]
    tab.fill("#where", "")
    tab.select_option("#sort", "")
    assert shown(tab) == ids(ROWS)


def test_an_address_shows_a_group_that_a_filter_hides(tab: Any) -> None:
    tab.fill("#where", "step=1")
    tab.evaluate("location.hash = 'step-2-group-1'")
    tab.wait_for_selector("#step-2-group-1")
    assert tab.is_hidden("#missing")
    tab.evaluate("location.hash = 'step-9-group-1'")
    tab.wait_for_selector("#missing")
    assert "Step 9, group 1 is not on this page" in tab.inner_text("#missing")


def test_a_page_without_samples(tab: Any, tmp_path: Path) -> None:
    page([], tmp_path / "empty.html", "run")
    other = tab.context.browser.new_page()
    other.on("pageerror", lambda error: pytest.fail(str(error)))
    other.goto((tmp_path / "empty.html").as_uri())
    assert "There are no samples." in other.inner_text("body")
    other.close()
