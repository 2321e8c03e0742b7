"""The failure rule as the user writes it."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import ConfigError
from dataflow.rewards.failure import KINDS, FailedShare, FailureRule, parse_rule
from dataflow.usercode.numeric import LARGEST_SCORE

pytestmark = pytest.mark.timeout(30)

RULES = ["fail", "score:0", "score:-1.5", "drop_sample", "drop_group", "replace_group"]


@pytest.mark.parametrize("text", RULES)
def test_a_rule_is_read_and_written(text: str) -> None:
    rule = parse_rule(text)
    assert str(rule) == text
    assert rule.kind == text.partition(":")[0]
    assert rule.drops == (text in ("drop_sample", "drop_group"))


def test_the_rules_are_all_there_are() -> None:
    assert {parse_rule(text).kind for text in RULES} == set(KINDS)
    assert FailureRule() == parse_rule("fail"), "what is not declared stops the run"


def test_only_a_score_has_a_number() -> None:
    assert parse_rule("score:-2e-3").score == -0.002
    assert math.isnan(parse_rule("drop_sample").score)


@pytest.mark.parametrize("text", RULES)
def test_validation_has_no_extra_groups(text: str) -> None:
    expected = "drop_group" if text == "replace_group" else text
    assert str(parse_rule(text).for_validation()) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop_sampel", "reward.on_failure=drop_sampel is unknown; did you mean 'drop_sample'?"),
        ("", "is unknown; give fail, score:X, drop_sample, drop_group, replace_group."),
        ("zzz", "is unknown; give fail, score:X"),
        ("FAIL", "is unknown"),
        ("fail:", "is unknown"),
        ("drop_group:1", "is unknown"),
        ("score", "reward.on_failure=score: give a finite number of at most 1e+15, as in score:0."),
        ("score:", "give a finite number"),
        ("score:zero", "give a finite number"),
        ("score:nan", "give a finite number"),
        ("score:-inf", "give a finite number"),
        ("score:1e999", "give a finite number"),
        ("score:1:2", "give a finite number"),
    ],
)
def test_what_is_no_rule(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rule(text)
    assert message in str(caught.value)


def test_a_rule_without_its_colon_names_the_rule_itself() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rule("fail:now")
    assert "did you mean 'fail'?" in str(caught.value)


@given(st.floats(-LARGEST_SCORE, LARGEST_SCORE))
def test_every_finite_score_is_taken(score: float) -> None:
    assert parse_rule(f"score:{score}").score == score


@pytest.mark.slow
@given(st.text(max_size=20))
def test_any_text_is_a_rule_or_an_error(text: str) -> None:
    with suppress(ConfigError):
        assert parse_rule(text).kind in KINDS


def test_a_score_that_float32_cannot_hold_is_no_rule() -> None:
    with pytest.raises(ConfigError, match=r"score:1e39: give a finite number"):
        parse_rule("score:1e39")


# --- how many may fail ---------------------------------------------------------------------------------------


def steps(share: FailedShare, count: int, rows: int, failing: bool = False) -> str:
    """Submits steps, each of which ends before the next; returns the first word of too many failures."""
    for _ in range(count):
        share.submitted(rows, rows)
        for row in range(rows):
            share.ended(f"row {row}" if failing else "")
            if passed := share.passed():
                return passed
    return ""


def test_of_the_first_step_the_share_is_of_all_that_was_submitted() -> None:
    share = FailedShare(0.1)
    assert steps(share, 1, 20, failing=True) == (
        "3 of 20 reward requests have failed, more than reward.max_failed_share=0.1 allows; the last one: row 2"
    )


@pytest.mark.parametrize("before", [1, 10, 200])
@pytest.mark.parametrize(("rows", "of"), [(50, 100), (400, 400)])
def test_a_service_that_dies_is_found_out_as_soon_after_many_steps_as_after_one(
    before: int, rows: int, of: int
) -> None:
    share = FailedShare(0.1)
    assert steps(share, before * (1 + of // rows), rows) == ""
    assert steps(share, 10, rows, failing=True).startswith(f"{of // 10 + 1} of the last {of} reward requests have")


def test_what_failed_long_ago_counts_no_more() -> None:
    share = FailedShare(0.1)
    assert steps(share, 10, 10) == ""
    for _ in range(50):
        assert steps(share, 1, 10, failing=True) == ""
        assert steps(share, 9, 10) == ""
    assert steps(share, 1, 10, failing=True) == ""
    assert steps(share, 8, 10) == ""
    assert steps(share, 1, 10, failing=True).startswith("11 of the last 100")


def test_the_share_ignores_the_first_few_requests_of_a_larger_step() -> None:
    share = FailedShare(0.1)
    share.submitted(8, 8)
    for _ in range(8):
        share.ended("broken")
    assert share.passed(more=True) == ""
    assert share.passed().startswith("8 of 8")
    share.submitted(8, 16)
    for _ in range(3):
        share.ended("broken")
    assert share.passed(more=True).startswith("11 of 16"), "of a hundred it would be too many, too"


@given(st.lists(st.tuples(st.integers(1, 150), st.lists(st.booleans(), max_size=150))), st.floats(0, 1))
def test_the_share_is_of_the_latest_that_ended(plan: list[tuple[int, list[bool]]], most: float) -> None:
    share, ends, submitted, largest = FailedShare(most), [], 0, 100
    for rows, fails in plan:
        share.submitted(rows, rows)
        submitted, largest = submitted + rows, max(largest, rows)
        for failed in fails[:rows]:
            share.ended("broken" if failed else "")
            ends.append(failed)
            known = min(submitted, largest)
            if len(ends) <= 100 or largest == 100:
                assert bool(share.passed()) == (sum(ends[-largest:]) > most * known)
            assert not (share.passed(more=True) and not share.passed())


def test_all_may_fail_and_none() -> None:
    assert steps(FailedShare(1.0), 5, 300, failing=True) == ""
    assert steps(FailedShare(0.0), 1, 300, failing=True).startswith("1 of 300")
    with pytest.raises(ConfigError, match=r"reward\.max_failed_share=1\.5; give a number from 0 to 1"):
        FailedShare(1.5)
