"""What user code returns: numbers, scores, columns, tokens."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dataflow.errors import DataflowError
from dataflow.graph import TaskInfo
from dataflow.rewards.results import read_number, read_result, read_scores, tokens_used


@pytest.mark.parametrize(
    "value",
    [
        None, math.nan, -math.inf, 10**400, "1", [1.0], range(1), float, np.array([5], dtype="m8[ns]"),
        np.complex64(1), pd.NA, pd.NaT, torch.zeros(2), torch.tensor(1j), Decimal("0.5"),
    ],
    ids=lambda value: f"{type(value).__name__} {str(value)[:20]}",
)  # fmt: skip
def test_what_is_no_finite_number_is_no_score(value: Any) -> None:
    for result in (value, (value, "q", "e"), {"score": value}):
        with pytest.raises(ValueError):
            read_result(result)
    with pytest.raises(ValueError):
        read_scores([1.0, value], 2)
    assert tokens_used({"tokens": value}) is None
    if not isinstance(value, float):
        with pytest.raises(DataflowError, match=r"stage 'mine' logs .* as metric 'm'; log a number"):
            TaskInfo(step=1, stage="mine").log({"m": value})


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0), (2, 2.0), (np.float32(0.5), 0.5), (np.array([5.0]), 5.0), (pd.Series([5], dtype="Int64"), 5.0),
        (Fraction(1, 2), 0.5), (torch.tensor([True]), 1.0), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_a_number(value: Any, number: float) -> None:
    assert read_number(value) == number
    assert read_result(value) == (number, {})
    assert read_scores(np.asarray([number, number]), 2) == [number, number]


def test_columns() -> None:
    assert read_result({"score": torch.tensor(1.0), "tokens": 7, "acc": True}) == (1.0, {"tokens": 7, "acc": True})
    assert read_result((0.5, "q", "e")) == (0.5, {"query": "q", "explanation": "e"})
    for result, message in (
        ({"scor": 1}, r"a dict without 'score' \(keys: 'scor'\)"),
        ({"score": None}, "a dict whose 'score' is None"),
        ({"score": 1, 2: 3}, "the key 2"),
        ({"score": 1.0, "response_mask": [1]}, "the key 'response_mask', which is a column of the rollout"),
        ((1, 2), "a tuple of 2"),
        ((math.nan, "q", "e"), "a tuple whose score is nan"),
        (torch.zeros(2, 3), r"a Tensor of shape \(2, 3\)"),
        (1e20, r"1e\+20, outside of ±1e\+15, where float32 may hold no finite adv"),
    ):
        with pytest.raises(ValueError, match=message):
            read_result(result)


@pytest.mark.parametrize(
    ("scores", "what"),
    [
        (None, "None"), (3.0, "a float"), ("ab", "a str"), ({0: 1.0, 1: 2.0}, "a dict"), ({1.0, 2.0}, "a set"),
        ([1.0], "1 scores for 2 samples"), ([1.0, 1e300], r"1e\+300, outside"),
        (np.asarray(3.0), "a ndarray of one number"), (torch.zeros(2, 2), r"a Tensor of shape \(2,\)"),
        ((score for score in (1.0, 2.0)), "a generator"),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_what_are_no_scores_of_a_group(scores: Any, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        read_scores(scores, 2)


def test_tokens_are_whole_numbers_of_any_type() -> None:
    assert [tokens_used({"tokens": n}) for n in (7, 7.0, np.int64(7), np.array([7]), torch.tensor(7.0))] == [7] * 5
    assert [tokens_used({"tokens": n}) for n in (-7, 7.5, True, [7], "7", 2**53)] == [None] * 6
