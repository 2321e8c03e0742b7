"""Copies for user code: deep enough for every kind of value, and which values are shared."""

from __future__ import annotations

import collections
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.usercode.copies import own_copy, own_options


@dataclass
class Facts:
    names: list[str] = field(default_factory=lambda: ["a"])


def objects(*parts: Any) -> np.ndarray:
    array = np.empty(len(parts), dtype=object)
    array[:] = parts
    return array


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"a": {"b": [1]}}, lambda value: value["a"]["b"].append(2)),
        ([{"role": "user"}], lambda value: value[0].update(role="none")),
        (([1],), lambda value: value[0].append(2)),
        ({1, 2}, lambda value: value.add(3)),
        (collections.defaultdict(list, a=[1]), lambda value: value["a"].append(2)),
        (Facts(), lambda value: value.names.append("b")),
        (np.zeros(3), lambda value: value.fill(1)),
        (objects({"a": [1]}), lambda value: value[0]["a"].append(2)),
        (torch.zeros(3), lambda value: value.add_(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_copy_shares_nothing_that_can_change(value: Any, change: Any) -> None:
    before, own = repr(value), own_copy(value)
    assert type(own) is type(value)
    assert repr(own) == before
    change(own)
    assert repr(own) != before
    assert repr(value) == before


def test_options_share_objects_and_no_containers() -> None:
    client = Facts()
    given = {"client": client, "urls": ["a"], "nested": {"b": [1]}}
    own = own_options(given)
    own["urls"].append("b")
    own["nested"]["b"].append(2)
    assert own["client"] is client
    assert given == {"client": client, "urls": ["a"], "nested": {"b": [1]}}


def test_rows_that_are_repeated_have_objects_of_their_own() -> None:
    prompts = Batch([0, 1], {"raw_prompt": [[{"role": "user"}], [{"role": "user"}]]}, {"m": [1]})
    rows = prompts.repeat(2)
    rows["raw_prompt"][0].append("said")
    assert [len(chat) for chat in rows["raw_prompt"]] == [2, 1, 1, 1]
    assert [len(chat) for chat in prompts["raw_prompt"]] == [1, 1]
    own = own_copy(prompts)
    own["raw_prompt"][0][0]["role"] = "none"
    own.meta["m"].append(2)
    own.groups[0] = 7
    assert (prompts["raw_prompt"][0], prompts.meta, prompts.ids) == ([{"role": "user"}], {"m": [1]}, (0, 1))
