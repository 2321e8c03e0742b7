"""Copies for user code: deep enough for every kind of value, and which values are shared."""

from __future__ import annotations

import collections
import functools
import threading
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dataflow.batch import Batch
from dataflow.usercode.copies import is_immutable, own_copy, own_options


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
        ([1, 2], lambda value: value.append(3)),
        (([1],), lambda value: value[0].append(2)),
        ({1, 2}, lambda value: value.add(3)),
        (bytearray(b"a"), lambda value: value.extend(b"b")),
        (collections.OrderedDict(a=[1]), lambda value: value["a"].append(2)),
        (collections.defaultdict(list, a=[1]), lambda value: value["a"].append(2)),
        (collections.deque([1]), lambda value: value.append(2)),
        (Facts(), lambda value: value.names.append("b")),
        (np.zeros(3), lambda value: value.fill(1)),
        (objects({"a": [1]}), lambda value: value[0]["a"].append(2)),
        (torch.zeros(3), lambda value: value.add_(1)),
        (torch.zeros(3, requires_grad=True) * 2, lambda value: value.detach().add_(1)),
        ({"array": [np.zeros(3)]}, lambda value: value["array"][0].fill(1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_copy_shares_nothing_that_can_change(value: Any, change: Any) -> None:
    before, own = repr(value), own_copy(value)
    assert type(own) is type(value)
    assert repr(own).partition(", grad_fn")[0] == before.partition(", grad_fn")[0]
    change(own)
    assert repr(own) != before
    assert repr(value) == before


def test_what_cannot_be_copied_is_shared_beside_what_can() -> None:
    lock = threading.Lock()
    value = {"lock": lock, "names": ["a"]}
    own = own_copy(value)
    own["names"].append("b")
    assert own["lock"] is lock
    assert value["names"] == ["a"]


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@dataclass
class Locked:
    names: list[str]
    lock: Any = field(default_factory=threading.Lock)


class Row(dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "hold",
    [
        lambda chat: {"raw_prompt": chat, "tree": nested(20_000)},
        lambda chat: {"raw_prompt": np.array([(chat,)], dtype=[("chat", object)])},
        lambda chat: {"raw_prompt": pd.Series([chat])},
        lambda chat: {"raw_prompt": pd.DataFrame({"chat": [chat]})},
        lambda chat: collections.defaultdict(list, raw_prompt=chat, lock=threading.Lock()),
        lambda chat: Row(raw_prompt=chat, lock=threading.Lock()),
        lambda chat: {"facts": Locked(chat)},
        lambda chat: MappingProxyType({"raw_prompt": chat}),
        lambda chat: [chat, nested(20_000), threading.Lock()],
    ],
    ids=["deep", "structured", "series", "frame", "defaultdict", "dict subclass", "dataclass", "proxy", "deep list"],
)
def test_a_part_that_is_hard_to_copy_leaves_the_others_their_own(hold: Any) -> None:
    chat = [{"role": "user"}]
    value = hold(chat)
    own = own_copy(value)
    assert type(own) is type(value)
    found = chat_in(own)
    assert found == chat
    assert found is not chat
    assert found[0] is not chat[0]


def chat_in(value: Any) -> Any:
    """Returns the chat that one of these holds."""
    match value:
        case list():
            return value[0]
        case Locked():
            return value.names
        case np.ndarray():
            return value["chat"][0]
        case pd.Series():
            return value[0]
        case pd.DataFrame():
            return value["chat"][0]
    return chat_in(value["facts"]) if "facts" in value else _chat(value["raw_prompt"])


def _chat(value: Any) -> Any:
    return value if isinstance(value, list) else chat_in(value)


def test_a_value_that_holds_itself() -> None:
    value: list[Any] = [["a"]]
    value.append(value)
    own = own_copy(value)
    assert own[1] is own
    assert own[0] is not value[0]


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


@dataclass(frozen=True)
class Frozen:
    value: Any


class Thawed(Frozen):
    """Its objects take further attributes."""


class Named(str):
    """Its objects have attributes, which can change."""


@pytest.mark.parametrize("value", [None, 1, "a", b"a", (1, ("b",)), frozenset({(1,)}), Frozen((1, Frozen(None)))])
def test_what_cannot_change(value: Any) -> None:
    assert is_immutable(value)


@pytest.mark.parametrize(
    "value", [[], {}, set(), ([],), Frozen([]), Facts(), Named("a"), (Named("a"),), Thawed(1), np.zeros(1)]
)
def test_what_may_change(value: Any) -> None:
    assert not is_immutable(value)


@dataclass(frozen=True)
class Cached:
    names: tuple[str, ...] = ("a",)

    @functools.cached_property
    def as_list(self) -> list[str]:
        return [*self.names]


@dataclass(frozen=True)
class Unset:
    value: int = 1
    later: Any = field(init=False)


@dataclass(frozen=True)
class Local:
    value: int = 1

    def __getstate__(self) -> dict[str, Any]:
        return {"value": 2}


@dataclass(frozen=True)
class Map(dict):  # type: ignore[type-arg]
    value: int = 1


def test_what_holds_more_or_other_things_than_frozen_fields_may_change() -> None:
    cached, itself = Cached(), Unset()
    assert is_immutable(cached)
    assert cached.as_list == ["a"]
    object.__setattr__(itself, "later", itself)
    assert not any(map(is_immutable, [cached, Unset(), itself, Local(), Map()]))
