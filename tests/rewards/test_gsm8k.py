"""GSM8K's answers, as models and the data set write them."""

import json
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.errors import ConfigError, DataError
from dataflow.rewards.gsm8k import compute_score, extract

GSM8K = Path(__file__).parents[3].parent / "shared" / "data" / "gsm8k"


@pytest.mark.parametrize(
    ("text", "strict"),
    [
        ("#### 42", "42"),
        ("It is 3 + 4 = 7.\n#### 7", "7"),
        ("#### 42.", "42"),
        ("#### 5.0", "5"),
        ("#### 5.50 dollars", "5.5"),
        ("#### .5", "0.5"),
        ("#### 007", "7"),
        ("#### -0.0", "0"),
        ("#### -3", "-3"),
        ("#### \u22123", "-3"),
        ("#### $18", "18"),
        ("#### $-18", "-18"),
        ("#### $1,234.50.", "1234.5"),
        ("#### 1,234, or so", "1234"),
        ("#### 3\n#### 4", "4"),
        ("#### 10%", "10"),
        ("#### 12,34", None),
        ("#### 1.2.3", None),
        ("the answer is 5", None),
    ],
)
def test_strict_takes_the_number_behind_the_marker(text, strict):
    assert extract(text) == strict


@pytest.mark.parametrize(
    ("text", "flexible"),
    [
        ("the answer is 5", "5"),
        ("first 3, then 4", "4"),
        ("3,4", "4"),
        ("10-5", "5"),
        ("(-5)", "-5"),
        ("(7)-5", "5"),
        ("no number", None),
    ],
)
def test_flexible_takes_the_last_number(text, flexible):
    assert extract(text, "flexible") == flexible


numbers = st.decimals(-(10**9), 10**9, allow_nan=False, places=3)


@given(numbers, st.booleans(), st.booleans(), st.sampled_from(["", ".", " apples", "\n"]))
def test_every_way_to_write_a_number_is_the_same_number(number, separated, dollar, end):
    text = f"{abs(number):,f}" if separated else f"{abs(number):f}"
    written = ("-" if number < 0 else "") + ("$" if dollar else "") + text
    found = extract(f"So 3 are 4.\n#### {written}{end}")
    assert found is not None
    assert Decimal(found) == number
    assert found == extract(f"it is {written}{end}", "flexible")
    assert compute_score("gsm8k", f"#### {written}{end}", f"{number:f}") == 1.0
    assert compute_score("gsm8k", f"#### {written}{end}", f"{number + 1:f}") == 0.0


def test_scores_of_right_wrong_and_unanswered():
    assert compute_score("", "#### 5", "5.0", None) == 1.0
    assert compute_score("", "#### 5", "6", {"index": 1}, format_score=0.1) == 0.1
    assert compute_score("", "5", "5", format_score=0.1) == 0.0
    assert compute_score("", "5", "5", method="flexible", score=2.0, unknown="x") == 2.0
    assert compute_score("", "#### 1000", "1,000") == 1.0


def test_a_bad_method_or_ground_truth_is_named():
    with pytest.raises(ConfigError, match=r"method 'strictly'; did you mean 'strict'\?$"):
        extract("#### 5", "strictly")
    with pytest.raises(ConfigError, match=r"method 'last'; use strict or flexible\.$"):
        extract("#### 5", "last")
    with pytest.raises(DataError, match="the ground truth 'five' holds no number"):
        compute_score("", "#### 5", "five")


@pytest.mark.skipif(not GSM8K.is_dir(), reason="GSM8K is not beside this checkout")
@pytest.mark.parametrize("split", ["train", "test"])
def test_each_answer_of_gsm8k_scores_against_its_own_ground_truth(split):
    rows = [json.loads(line) for line in (GSM8K / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 1000
    for row in rows:
        truth = row["answer"].rsplit("####", 1)[1].strip()
        assert compute_score("openai/gsm8k", row["answer"], truth) == 1.0, row
        assert compute_score("openai/gsm8k", row["answer"], truth, method="flexible") == 1.0, row
        assert extract(row["answer"]) == extract(truth, "flexible") == truth.replace(",", ""), row
