"""Conditions and orders of samples: what is parsed means what it says, and anything else is one sentence."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import ConfigError
from dataflow.samples.query import Condition, parse_where, select

ROWS: list[dict[str, Any]] = [
    {"group": 0, "score": 0.0, "latency_s": 2.0, "explanation": "Off by one", "truncated": False, "how": None},
    {"group": 1, "score": 1.0, "latency_s": 9.5, "explanation": "right", "truncated": True, "how": "hedged"},
    {"group": 2, "score": math.nan, "latency_s": 0.5, "explanation": None, "truncated": False, "how": "failed"},
]


def groups(where: str | None = None, sort: str | None = None) -> list[int]:
    return [row["group"] for row in select(ROWS, where, sort)]


@pytest.mark.parametrize(
    ("where", "found"),
    [
        ("score<0.5", [0]),
        ("score >= 0", [0, 1]),
        ("score != 1", [0, 2]),
        ("score=null", [2]),
        ("score!=null and latency>3", [1]),
        ("explanation~'off BY'", [0]),
        ('explanation = "right" and score==1', [1]),
        ("explanation!=right", [0, 2]),
        ("truncated=true", [1]),
        ("how=null", [0]),
        ("how='null'", []),
        ("latency_s<1e3 AND group>0", [1, 2]),
        ("reward<=1", [0, 1]),
    ],
)
def test_what_a_condition_selects(where: str, found: list[int]) -> None:
    assert groups(where) == found


def test_rows_are_sorted_and_those_without_a_value_come_last() -> None:
    assert groups(sort="score") == [0, 1, 2]
    assert groups(sort="-score") == [1, 0, 2]
    assert groups(sort="-latency") == [1, 0, 2]
    assert groups(sort="explanation") == [0, 1, 2]
    assert groups("latency<9", "-latency") == [0, 2]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("score", "'score' is no condition"),
        ("score<", "'score<' is no condition"),
        ("score<1 or group=1", "'score<1 or group=1' is no condition"),
        ("score<1 and", "no condition"),
        ("explanation='open", "no condition"),
        ("__import__('os').system('true')", "no condition"),
        ("scor<1", "no column 'scor'; did you mean 'score'?"),
        ("score<high", "'score' is a number, 'high' is not; give a number"),
        ("explanation<z", "'explanation' is a text; compare it with"),
        ("truncated=maybe", "'truncated' is true or false, 'maybe' is not"),
    ],
)
def test_what_is_no_condition_is_one_sentence(where: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select(ROWS, where, None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rows_of_several_files_may_differ_in_their_columns() -> None:
    rows = [{"group": 0, "score": 1.0}, {"group": 1, "score": 0.5, "query": "q"}]
    assert [row["group"] for row in select(rows, "query=null", None)] == [0]
    assert [row["group"] for row in select(rows, "query~Q", "query")] == [1]


def test_integers_are_compared_digit_by_digit() -> None:
    rows = [{"uid": 2**53 + extra} for extra in range(3)]
    for row in rows:
        assert select(rows, f"uid={row['uid']}", None) == [row]
    assert select(rows, f"uid>{2**53}", None) == rows[1:]
    assert select(rows, f"uid<{2**53 + 1}.5", None) == rows[:2]
    assert select(list(reversed(rows)), None, "uid") == rows


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z_0-9./-]{0,8}", fullmatch=True)
VALUES = st.text(st.characters(codec="utf-8"), max_size=12)
CONDITIONS = st.builds(Condition, NAMES, st.sampled_from(["=", "!=", "<", "<=", ">", ">=", "~"]), VALUES, st.just(True))


def written(condition: Condition, quote: str) -> str:
    value = condition.value.replace("\\", "\\\\").replace(quote, f"\\{quote}")
    return f"{condition.column} {condition.op} {quote}{value}{quote}"


@given(st.lists(CONDITIONS, min_size=1, max_size=4), st.sampled_from("\"'"))
def test_what_was_written_is_what_is_parsed(conditions: list[Condition], quote: str) -> None:
    assert parse_where(" and ".join(written(c, quote) for c in conditions)) == conditions


@given(st.text(max_size=40))
def test_any_text_is_conditions_or_a_sentence(text: str) -> None:
    with contextlib.suppress(ConfigError):  # any other error fails the test
        assert all(c.column and c.op for c in parse_where(text))


@given(st.lists(st.one_of(st.none(), st.floats(allow_infinity=True), st.integers(-9, 9)), max_size=12), st.booleans())
def test_sorting_keeps_every_row_once(values: list[Any], falling: bool) -> None:
    rows = [{"group": i, "score": value} for i, value in enumerate(values)]
    found = select(rows, None, "-score" if falling else "score")
    assert sorted(row["group"] for row in found) == list(range(len(values)))
    there = [row["score"] for row in found if row["score"] is not None and not math.isnan(row["score"])]
    assert there == sorted(there, reverse=falling)
    assert [row["score"] for row in found[: len(there)]] == there, "rows without a value come last"
