"""Columns: bit for bit what they were, whichever rows are chosen before they are read, and wherever they are read."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from dataflow.batch import Batch
from dataflow.columns import Column, Objects, Ragged, Texts

WIDTH = 9


def sent(value: Any, protocol: int = 5) -> Any:
    """Returns a value as another process gets it of Ray: its arrays are memory that must not be written."""
    if protocol < 5:
        return pickle.loads(pickle.dumps(value, protocol=protocol))
    buffers: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(inside, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers])


def size(value: Any) -> int:
    return len(pickle.dumps(value))


@st.composite
def matrices(draw: st.DrawFn, pad: int = 0) -> tuple[Ragged, np.ndarray]:
    """Rows of values between padding, as parts of an array with others between them; and the matrix that they are."""
    runs = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), max_size=5))
    starts, lengths, gaps = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    dtype = np.dtype(draw(st.sampled_from(["int64", "float32"])))
    values = np.array(draw(st.lists(st.integers(0, 3), min_size=30, max_size=40)), dtype=np.int8)
    begins = np.cumsum(gaps + lengths) - lengths
    matrix = np.full((len(runs), WIDTH), pad, dtype)
    for row, begin, length, start in zip(matrix, begins, lengths, starts, strict=True):
        row[start : start + length] = values[begin : begin + length]
    return Ragged(values, begins, lengths, starts, WIDTH, dtype, pad), matrix


def same(found: torch.Tensor, wanted: np.ndarray) -> None:
    array = found.numpy()
    assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
    assert array.tobytes() == wanted.tobytes()


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 1).flatmap(matrices), st.sampled_from([4, 5]), st.data())
def test_a_matrix_is_bit_for_bit_what_it_was(
    both: tuple[Ragged, np.ndarray], protocol: int, data: st.DataObject
) -> None:
    column, matrix = both
    rows = st.lists(st.integers(0, len(matrix) - 1), max_size=8) if len(matrix) else st.just([])
    at, last = np.array(data.draw(rows), dtype=np.int64), data.draw(st.integers(0, WIDTH))
    for one, wanted in ((column, matrix), (column.rows(at), matrix[at])):
        for found in (one, sent(one, protocol), sent(sent(one)), one.compact()):
            same(found.read(), wanted)
        batch = Batch(range(len(wanted)), {"ragged": one, "dense": torch.from_numpy(wanted.copy())})
        for name in ("ragged", "dense"):
            assert batch.nonzero(name, last).tolist() == (wanted[:, WIDTH - last :] != 0).sum(axis=1).tolist()
            assert batch.last(name).tolist() == [max([0, *np.flatnonzero(row).tolist()]) for row in wanted]
        assert_array_equal(batch.within("ragged", "dense"), wanted[wanted != 0])
    whole = Column.concat([column.rows(at), column, sent(column.rows(at))])
    assert whole is not None
    same(whole.read(), np.concatenate([matrix[at], matrix, matrix[at]]))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.text(st.characters(codec=None)), max_size=6), st.sampled_from([4, 5]), st.data())
def test_any_texts_and_objects_are_what_they_were(texts: list[str], protocol: int, data: st.DataObject) -> None:
    rows = st.lists(st.integers(0, len(texts) - 1), max_size=8) if texts else st.just([])
    at = np.array(data.draw(rows), dtype=np.int64)
    for column in (Texts.of(texts), Objects.of(texts)):
        for found in (column, sent(column, protocol), sent(sent(column), protocol)):
            assert list(found.read()) == texts
            assert list(sent(found.rows(at), protocol).read()) == [texts[row] for row in at]
        both = Column.concat([column, type(column).of(["x"]), column.rows(at)])
        assert both is not None
        assert list(sent(both, protocol).read()) == [*texts, "x", *(texts[row] for row in at)]


def test_what_lies_within_a_mask_is_read_without_padding() -> None:
    lengths, starts, values = np.array([2, 3]), np.array([1, 0]), np.array([5, 9, 1, 2, 9], np.int8)
    begins, integers = np.cumsum(lengths) - lengths, np.dtype(np.int64)
    mask = Ragged(np.ones(5, np.int8), begins, lengths, starts, 4, integers)
    batch = Batch([0, 1], {"tokens": Ragged(values, begins, lengths, starts, 4, integers, 9), "mask": mask})
    for rows, wanted in ((batch, [5, 9, 1, 2, 9]), (batch.select([1, 0]), [1, 2, 9, 5, 9])):
        assert rows.within("tokens", "mask").tolist() == wanted
        assert isinstance(rows.tensors.raw["tokens"], Ragged), "it is not read"
        rows["mask"]
        assert rows.within("tokens", "mask").tolist() == wanted


def test_rows_travel_without_the_values_of_others_and_once() -> None:
    lengths = np.full(64, 100)
    begins = np.cumsum(lengths) - lengths
    tokens = Ragged(np.arange(6400), begins, lengths, np.zeros_like(lengths), 1000, np.dtype(np.int64))
    images = [np.full(2000, at, dtype=np.uint8) for at in range(64)]
    batch = sent(Batch(range(64), {"tokens": tokens, "same": tokens.rows(np.arange(64)), "image": images}))
    assert size(batch) < 6400 * 8 + 64 * 2200 + 8192, "two columns of one array"
    few = batch.repeat(8).select([7, 3])
    assert size(few) < 2 * (2 * 800 + 2200) + 4096
    got = sent(few)
    same(got["tokens"], few["tokens"].numpy())
    assert [int(image[0]) for image in got["image"]] == [7] * 8 + [3] * 8
    got["image"][0][:] = 77
    assert int(got["image"][1][0]) == 7, "each row has its own"


def test_a_tensor_of_two_names_travels_once_and_is_two_tensors_then() -> None:
    values = torch.rand(64, 1024)
    batch = Batch(range(64), {"advantages": values, "returns": values})
    assert size(batch) < 1.1 * size(batch.only("returns"))
    found = sent(batch)
    found["advantages"].zero_()
    assert torch.equal(found["returns"], values)


class Object:
    def __init__(self, at: int) -> None:
        self.at = at


def test_objects_that_no_stage_reads_are_loaded_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = Mock(side_effect=pickle.loads)
    monkeypatch.setattr("dataflow.columns.pickle", Mock(loads=loads))
    batch = Batch([0, 0, 1, 2], {"one": [Object(at) for at in range(4)], "text": list("abcd")})
    got = sent(sent(batch))
    some = sent(Batch.concat([got.select([2]), got.select([0])]))
    assert list(some["text"]) == ["d", "a", "b"]
    assert not loads.called
    assert [each.at for each in some["one"]] == [3, 0, 1]
    assert loads.call_count == 3
    some["one"][1].at = 7  # what a stage returns holds what it did to its objects
    assert [each.at for each in sent(some.select([0]))["one"]] == [7, 1]


@pytest.mark.parametrize("values", [["a", 1], [["a"], ["b"]], [], [lambda: 3]])
def test_objects_of_any_type_travel(values: list[Any]) -> None:
    found = list(sent(Batch(range(len(values)), {"x": values}))["x"])
    assert [one() if callable(one) else one for one in found] == [one() if callable(one) else one for one in values]


@pytest.mark.parametrize("made", [lambda b: b, sent, copy.deepcopy], ids=["made here", "sent", "copied"])
def test_a_change_to_a_batch_shows_in_none_that_was_made_of_it(made: Any) -> None:
    batch = made(Batch([0, 1, 2], {"chat": [["a"], ["b"], ["c"]], "text": ["x", "y", "z"], "t": torch.ones(3, 2)}))
    repeated, half, one, own = batch.repeat(2), batch.select([0, 2]), Batch.concat([batch]), copy.deepcopy(batch)
    batch["chat"][0].append("more")
    batch["text"][:] = ["X"] * 3
    batch["t"].zero_()
    batch.meta["m"] = 1
    repeated["chat"][2].append("too")
    assert list(repeated["chat"]) == [["a"], ["a"], ["b", "too"], ["b"], ["c"], ["c"]]
    assert list(half["text"]) == ["x", "z"]
    assert (list(one["text"]), one["t"].sum().item(), one.meta) == (["x", "y", "z"], 6.0, {})
    assert (list(own["chat"]), own["t"].sum().item()) == ([["a"], ["b"], ["c"]], 6.0)
    assert list(sent(batch)["text"]) == ["X"] * 3


def test_arrays_among_objects_can_be_written_to() -> None:
    got = sent(Batch([0, 1], {"boxes": [np.zeros((0, 4)), np.ones((2, 4))]}))
    assert [box.shape for box in got["boxes"]] == [(0, 4), (2, 4)]
    got["boxes"][1][0] = 7.0
