"""The key of a reward request: the same everywhere for the same content, another for any other."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections import OrderedDict, defaultdict
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


def test_each_argument_counts() -> None:
    others = [{**CALL, name: "x"} for name in CALL] + [{**CALL, name: None} for name in CALL]
    keys = [key_of(call) for call in (CALL, *others)]
    assert {len(found) for found in keys} == {16}
    assert len(set(keys)) == len(keys)
    assert key_of({**CALL, "reward_router_address": "127.0.0.1:80"}) == keys[0]
    assert key_of({name: value for name, value in CALL.items() if name != "extra_info"}) == keys[4 + 4]
    assert key_of(CALL, scorer="judge-7b") != keys[0]


def test_the_border_between_arguments_counts() -> None:
    pairs = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc"), ("a", "b\x00c"), ("a\x00b", "c")]
    keys = {key_of({"solution_str": response, "ground_truth": truth}) for response, truth in pairs}
    assert len(keys) == len(pairs)


@pytest.mark.parametrize(
    "values",
    [
        [1, "1", True, 1.0, b"1", [1], (1,), {1}, frozenset({1}), {"1": 1}, {1: 1}, None, "", [], {}, (), "None"],
        [[[1], 2], [1, [2]], [[1, 2]], [1, 2], ["1, 2"], "[1, 2]"],
        [{"a": {"b": 1}}, {"a": {}, "b": 1}, {"a": "b", "b": 1}, [("a", {"b": 1})]],
        [np.zeros(4), np.zeros((2, 2)), np.zeros(4, np.float32), np.zeros(4, np.int64), [0.0] * 4, bytes(32)],
        [np.array([None, 1], object), np.array([[None, 1]], object), [None, 1]],
        [0.1, np.float32(0.1), 0.10000000000000002, float("nan"), float("inf"), -0.0, 0.0],
        ["é", "e\u0301", "\ud800", "\ud801", "?"],
    ],
)
def test_values_and_types_that_differ(values: list[Any]) -> None:
    for one, other in itertools.combinations(values, 2):
        assert key(one) != key(other), (one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 1, "b": [{"c": 2, "d": 3}]}, {"b": [{"d": 3, "c": 2}], "a": 1}),
        ({1: "a", "b": 2, None: 3}, {None: 3, "b": 2, 1: "a"}),
        ({"a", "b", "c"}, {"c", "b", "a"}),
        ({8, 0}, {0, 8}),
        (np.int64(3), 3),
        (np.float64(0.5), 0.5),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.arange(8)[::2], np.array([0, 2, 4, 6])),
        (np.array([{"b": 1, "a": 2}], object), np.array([{"a": 2, "b": 1}], object)),
        (float("nan"), float("nan")),
        ([10**5000], [10**5000]),
        (np.datetime64("2026-01-01"), np.datetime64("2026-01-01")),
        (defaultdict(int, a=1), defaultdict(int, a=1)),
        (OrderedDict(a=1), OrderedDict(a=1)),
        (RuntimeError("x"), RuntimeError("x")),
    ],
)
def test_the_same_content(one: Any, other: Any) -> None:
    assert key(one) == key(other)


def test_the_sharing_of_texts_does_not_matter() -> None:
    text = "".join(["user", " said"])
    assert key([text, text]) == key([text, "".join(["user ", "said"])])


def test_tensors() -> None:
    for kind in (torch.float32, torch.bfloat16, torch.bool):
        one = torch.tensor([[1, 0], [0, 1]], dtype=kind)
        assert key(one) == key(one.clone()) == key(one.t())
        assert key(one) != key(one + one if kind is not torch.bool else ~one)
        assert key(one) != key(one.reshape(4))
    assert key(torch.tensor(1.0)) != key(torch.tensor(1))


def test_a_long_response_counts_to_its_end() -> None:
    text = "x" * 300_000
    keys = {key_of({"solution_str": response}) for response in (text, text + "x", text[:-1] + "y", "y" + text[1:])}
    assert len(keys) == 4


PROGRAM = """
import sys
import numpy as np
from dataflow.rewards.ledger import key_of
prompt = [{"role": "user", "content": "3 + 4?"}]
extra = {"index": np.int64(3), "tags": {"a", "b", "c", "d"}, "raw_prompt": np.array(prompt, dtype=object)}
names = sorted(extra, reverse="reverse" in sys.argv)
call = {"data_source": "d", "solution_str": "#### 7", "extra_info": {name: extra[name] for name in names}}
print(key_of(call).hex())
"""


@pytest.mark.slow
def test_another_process_finds_the_same_key() -> None:
    answers = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM, order],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
            timeout=50,
        ).stdout
        for order, seed in (("", "1"), ("reverse", "2"))
    ]
    assert answers[0] == answers[1]
    assert len(answers[0].strip()) == 32


def test_arguments_that_cannot_be_pickled_are_an_error() -> None:
    circle: list[Any] = []
    circle.append(circle)
    for value in (threading.Lock(), lambda: 0, (part for part in [1]), circle):
        with pytest.raises(
            DataflowError, match=r"^a request has no key, as its arguments cannot be pickled .*; keep such objects out"
        ):
            key(value)
