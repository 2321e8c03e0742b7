"""The key of a reward request: the same everywhere for the same content, another for any other."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.errors import DataflowError
from dataflow.rewards.ledger import key_of

pytestmark = pytest.mark.timeout(60)

CALL = {"data_source": "openai/gsm8k", "solution_str": "#### 7", "ground_truth": "7", "extra_info": {"index": 3}}


def key(value: Any) -> bytes:
    return key_of({**CALL, "extra_info": {"value": value}})


def test_each_argument_and_the_scorer_count_and_no_other_keyword() -> None:
    others = [{**CALL, name: "x"} for name in CALL] + [{**CALL, name: None} for name in CALL]
    keys = [key_of(call) for call in (CALL, *others, {**CALL, "solution_str": "x" * 300_000})]
    keys += [key_of({**CALL, "solution_str": "x" * 300_001}), key_of(CALL, scorer="judge-7b")]
    assert len(set(keys)) == len(keys)
    assert key_of({**CALL, "reward_router_address": "127.0.0.1:80"}) == keys[0]


@pytest.mark.parametrize(
    "values",
    [
        [1, "1", True, 1.0, [1], {"1": 1}, None, "", [], {}],
        [[[1], 2], [1, [2]], [1, 2], {"a": {"b": 1}}, {"a": {}, "b": 1}],
        [np.zeros(4), np.zeros((2, 2)), np.zeros(4, np.float32), [0.0] * 4],
        [np.array([None, 1], object), np.array([[None, 1]], object), [None, 1]],
        [{1, 2}, frozenset({1, 2}), {1, 3}, torch.zeros(4), torch.zeros(2, 2), torch.ones(4), torch.zeros(4).half()],
        [0.1, np.float32(0.1), float("nan"), -0.0, 0.0],
    ],
)
def test_values_and_types_that_differ(values: list[Any]) -> None:
    for one, other in itertools.combinations(values, 2):
        assert key(one) != key(other), (one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"d": 3, "c": 2}], "a": 1}),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.arange(8)[::2], np.array([0, 2, 4, 6])),
        (np.array([{"b": 1, "a": 2}], object), np.array([{"a": 2, "b": 1}], object)),
        ({8, 0}, {0, 8}),
        (torch.arange(8)[::2], torch.tensor([0, 2, 4, 6])),
        (["user said"] * 2, ["user said", "".join(["user ", "said"])]),
    ],
)
def test_the_same_content(one: Any, other: Any) -> None:
    assert key(one) == key(other)


PROGRAM = """
import sys
import numpy as np
import torch
from dataflow.rewards.ledger import key_of
prompt = [{"role": "user", "content": "3 + 4?"}]
extra = {"index": np.int64(3), "tags": {"a": 1, "b": None}}
extra |= {"kinds": {"easy", "long", "odd"}, "weights": torch.ones(2), "raw_prompt": np.array(prompt, dtype=object)}
names = sorted(extra, reverse="reverse" in sys.argv)
call = {"data_source": "d", "solution_str": "#### 7", "extra_info": {name: extra[name] for name in names}}
print(key_of(call).hex())
"""


@pytest.mark.slow
def test_another_process_finds_the_same_key() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, order],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
            timeout=50,
        ).stdout
        for order, seed in (("", "1"), ("reverse", "2"))
    ]
    assert found[0] == found[1]
    assert len(found[0].strip()) == 32


def test_arguments_that_cannot_be_pickled_are_an_error() -> None:
    with pytest.raises(DataflowError, match=r"^a request has no key, as its arguments cannot be pickled .*; keep such"):
        key(threading.Lock())
