"""Which values that user code returns are numbers."""

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
from dataflow.usercode.numeric import real_number


def name(value: Any) -> str:
    # Addresses differ between the processes of pytest-xdist.
    return f"{type(value).__name__} {str(value).partition(' at 0x')[0][:20]}"


@pytest.mark.parametrize(
    "value",
    [
        np.timedelta64(5, "ns"), np.array([5], dtype="m8[ns]"), np.complex64(1), np.str_("1"), pd.NA, pd.NaT,
        pd.DataFrame([[5, 6]]), torch.zeros(2), torch.tensor(1j), Decimal("0.5"), Fraction(10**400), "1", b"1", [1.0],
        range(1), float, lambda: 1.0,
    ],
    ids=name,
)  # fmt: skip
def test_what_only_converts_to_a_number(value: Any) -> None:
    with pytest.raises(ValueError):
        read_number(value)
    for result in (value, (value, "q", "e"), {"score": value}):
        with pytest.raises(ValueError):
            read_result(result)
    with pytest.raises(ValueError):
        read_scores([1.0, value], 2)
    assert tokens_used({"tokens": value}) is None
    with pytest.raises(DataflowError, match=r"stage 'mine' logs .* as metric 'm'; log a number"):
        TaskInfo(step=1, stage="mine").log({"m": value})


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (np.longdouble(0.5), 0.5), (np.array([5.0]), 5.0), (pd.Series([5], dtype="Int64"), 5.0), (Fraction(1, 2), 0.5),
        (torch.tensor([True]), 1.0), (torch.tensor(0.5, dtype=torch.bfloat16), 0.5),
    ],
    ids=name,
)  # fmt: skip
def test_what_is_one(value: Any, number: float) -> None:
    assert read_number(value) == real_number(value) == number
    assert type(real_number(value)) is float


@pytest.mark.parametrize(
    "scores",
    [np.array([1, 2], dtype="m8[ns]"), pd.Series([1.0, None]), bytearray(b"ab"), {0: 1.0, 1: 2.0}.keys(),
     torch.zeros(2, 2), torch.tensor([1.0, math.nan])],
    ids=name,
)  # fmt: skip
def test_lists_of_scores_that_are_none(scores: Any) -> None:
    with pytest.raises(ValueError):
        read_scores(scores, 2)


def test_tokens_are_whole_numbers_of_any_type() -> None:
    assert [tokens_used({"tokens": n}) for n in (7, 7.0, np.int64(7), np.array([7]), torch.tensor(7.0))] == [7] * 5
    assert [tokens_used({"tokens": n}) for n in (-7, 7.5, math.nan, True, None, [7], "7", 2**53)] == [None] * 8
