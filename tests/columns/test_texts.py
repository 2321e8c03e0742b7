"""Texts travel in one buffer, and are the same for each reader."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.columns.pickled import Pickled, objects
from dataflow.columns.texts import Texts, encoded


def column_of(texts: list[str]) -> np.ndarray:
    array = np.empty(len(texts), dtype=object)
    array[:] = texts
    return array


def sent(value: Pickled, protocol: int) -> Pickled:
    buffers: list[pickle.PickleBuffer] = []
    keep = buffers.append if protocol == 5 else None
    data = pickle.dumps(value, protocol, buffer_callback=keep)
    found: Pickled = pickle.loads(data, buffers=[memoryview(bytes(one.raw())).toreadonly() for one in buffers])
    return found


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(st.characters(codec=None)), max_size=6), st.sampled_from([4, 5]), st.data())
def test_any_texts_are_what_they_were(texts: list[str], protocol: int, data: st.DataObject) -> None:
    column = Pickled([Texts.joined([encoded(text) for text in texts])])
    rows = st.lists(st.integers(0, len(texts) - 1), max_size=8) if texts else st.just([])
    index = np.array(data.draw(rows), dtype=np.int64)
    both = Pickled.concat([column, Pickled([Texts.joined([b"x"])])])
    for found in (column, sent(column, protocol), sent(sent(column, protocol), protocol)):
        assert list(found.array()) == texts
        assert list(found.rows(index).array()) == [texts[at] for at in index]
    assert list(sent(both, protocol).array()) == [*texts, "x"]
    assert list(sent(column.rows(index), protocol).array()) == [texts[at] for at in index]


def test_a_text_of_many_rows_travels_once() -> None:
    one = "".join(["the same text"] * 100)
    assert Texts.of(column_of([one] * 50)) is None
    assert len(pickle.dumps(objects(column_of([one] * 50)))) < 2 * len(one)
    assert list(sent(objects(column_of([one] * 50)), 5).array()) == [one] * 50


@pytest.mark.parametrize("values", [["a", 1], ["a", None], [["a"], ["b"]], []])
def test_other_objects_are_pickled(values: list[object]) -> None:
    array = np.empty(len(values), dtype=object)
    for at, value in enumerate(values):
        array[at] = value
    assert Texts.of(array) is None
    assert list(sent(objects(array), 5).array()) == values


def test_subclasses_of_str_keep_their_type() -> None:
    class Marked(str):
        __slots__ = ()

    assert Texts.of(column_of([Marked("a")])) is None


def test_a_change_to_a_column_does_not_reach_other_readers() -> None:
    texts = [f"text {row}" for row in range(3)]
    whole = pickle.loads(pickle.dumps(Batch(range(3), {"text": texts})))
    some = whole.rows([2, 0])
    whole["text"][:] = "changed"
    assert list(some["text"]) == ["text 2", "text 0"]
    assert list(pickle.loads(pickle.dumps(whole))["text"]) == ["changed"] * 3
