"""The failure rule as the user writes it, and the share of failures that stops a run."""

from __future__ import annotations

import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.failure import KINDS, FailedShare, FailureRule, parse_rule

pytestmark = pytest.mark.timeout(30)

RULES = ["fail", "score:0", "score:-1.5", "drop_sample", "drop_group", "replace_group"]


@pytest.mark.parametrize("text", RULES)
def test_a_rule_is_read_and_written_and_validation_has_no_extra_groups(text: str) -> None:
    rule = parse_rule(text)
    assert str(rule) == text
    assert rule.kind in KINDS
    assert rule.drops == (text in ("drop_sample", "drop_group"))
    assert str(rule.for_validation()) == text.replace("replace_group", "drop_group")
    assert FailureRule() == parse_rule("fail"), "what is not declared stops the run"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop_sampel", "reward.on_failure=drop_sampel is unknown; did you mean 'drop_sample'?"),
        ("zzz", "is unknown; give fail, score:X, drop_sample, drop_group, replace_group."),
        ("drop_group:1", "is unknown"),
        ("score", "reward.on_failure=score: give a finite number of at most 1e+15, as in score:0."),
        ("score:nan", "give a finite number"),
        ("score:1e39", "give a finite number"),
    ],
)
def test_what_is_no_rule(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_rule(text)
    assert message in str(caught.value)


def steps(share: FailedShare, count: int, rows: int, failing: bool = False) -> str:
    """Submits steps, each of which ends before the next; returns the first message of too many failures."""
    for _ in range(count):
        share.submitted(rows, rows)
        for row in range(rows):
            share.ended(f"row {row}" if failing else "")
            if passed := share.passed():
                return passed
    return ""


@pytest.mark.parametrize("before", [0, 1, 200])
def test_a_service_that_dies_is_detected_as_early_after_many_steps_as_after_one(before: int) -> None:
    share = FailedShare(0.1)
    assert steps(share, before, 400) == ""
    of = "the last 400" if before else "400"
    words = (
        f"41 of {of} reward requests have failed, more than reward.max_failed_share=0.1 allows; the last one: row 40"
    )
    assert steps(share, 10, 400, failing=True) == words


def test_the_share_of_a_step_in_chunks_counts_from_a_hundred_requests_on() -> None:
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


def test_all_may_fail_and_none() -> None:
    assert steps(FailedShare(1.0), 5, 300, failing=True) == ""
    assert steps(FailedShare(0.0), 1, 300, failing=True).startswith("1 of 300")
    with pytest.raises(ConfigError, match=r"reward\.max_failed_share=1\.5; give a number from 0 to 1"):
        FailedShare(1.5)
