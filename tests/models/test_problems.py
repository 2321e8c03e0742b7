"""Generated problems: right answers, GSM8K's form, and disjoint train and held-out sets."""

import re
from collections import Counter

import pytest

from dataflow.errors import DataError
from dataflow.models.problems import STORIES, apply, generate, held_out, solve
from dataflow.rewards.gsm8k import extract


def test_the_same_seed_makes_the_same_problems_and_another_seed_others():
    assert generate(50, 20, 3) == generate(50, 20, 3)
    assert generate(50, 20, 3) != generate(50, 20, 4)
    assert generate(10, 0, 3)[1] == []


def test_train_and_held_out_questions_are_disjoint_across_seeds():
    train = {p["question"] for seed in range(4) for p in generate(2000, 0, seed)[0]}
    val = {p["question"] for seed in range(4) for p in generate(0, 500, seed)[1]}
    assert len(train) > 6000
    assert not train & val
    assert all(held_out(q) for q in val)
    assert not any(held_out(q) for q in train)


def test_problems_are_all_different_half_of_two_operations_and_of_every_story():
    train, val = generate(4000, 512, 0)
    assert len({p["question"] for p in train}) == 4000
    assert Counter(len(p["ops"]) for p in train) == {1: 2000, 2: 2000}
    assert {p["story"] for p in val} == set(range(len(STORIES)))
    assert all(STORIES[p["story"]].ops == p["ops"] for p in train)
    # Any stretch is a fair sample: a validation on the first rows must see both sizes.
    assert 20 < sum(len(p["ops"]) for p in val[:32]) - 32 + 16 < 44


def test_answers_are_right_and_stay_in_range():
    for problem in generate(1000, 200, 1)[0]:
        value, *rest = problem["operands"]
        lines = problem["answer"].split("\n")
        for line, op, right in zip(lines, problem["ops"], rest, strict=False):
            left, seen, operand, result = re.search(r"(\d+) ([-+*]) (\d+) = (\d+)\.$", line).groups()
            assert (int(left), seen, int(operand)) == (value, op, right)
            assert 1 <= value <= (10 if op == "*" else 20)
            value = {"+": value + right, "-": value - right, "*": value * right}[op]
            assert int(result) == value
            assert 0 <= value <= 150
        assert lines[-1] == f"#### {value}"
        assert extract(problem["answer"]) == extract(problem["answer"], "flexible") == str(value)
        assert all(f" {n}" in problem["question"] for n in problem["operands"])


def test_operations_that_do_not_go_are_none():
    assert [apply(3, "-", 4), apply(11, "*", 2), apply(21, "+", 2), apply(0, "+", 2)] == [None] * 4
    assert solve("--", (9, 5, 6)) is None
    assert solve("-", (9, 9)) == "It is 9 - 9 = 0.\n#### 0"


@pytest.mark.slow
def test_more_than_there_are_is_an_error(monkeypatch):
    monkeypatch.setattr("dataflow.models.problems.STORIES", (STORIES[0], STORIES[-1]))
    with pytest.raises(DataError, match=r"^9000 held-out problems are more than the stories make"):
        generate(0, 9000, 0)
