"""The failure rule as the user writes it."""

from __future__ import annotations

import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import ConfigError
from dataflow.rewards.failure import KINDS, FailureRule, parse_rule

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
def test_validation_has_no_spare_groups(text: str) -> None:
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
        ("score", "reward.on_failure=score: give a finite number, as in score:0."),
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


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_finite_score_is_taken(score: float) -> None:
    assert parse_rule(f"score:{score}").score == score


@given(st.text(max_size=20))
def test_any_text_is_a_rule_or_an_error_that_says_so(text: str) -> None:
    with suppress(ConfigError):
        assert parse_rule(text).kind in KINDS
