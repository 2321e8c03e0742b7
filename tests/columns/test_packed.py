"""Packed columns: bit for bit what they were, whatever is chosen of them before they are read."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from dataflow.batch import Batch
from dataflow.columns.packed import Packed, packed
from dataflow.columns.pickled import objects
from dataflow.columns.ragged import Dense, Progression, Ragged, narrowed

KINDS = ("int64", "int32", "uint8", "bool", "float32", "float64", "float16")


@pytest.fixture(autouse=True)
def _every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches for padding in small columns, too."""
    monkeypatch.setattr("dataflow.columns.packed._LEAST_BYTES", 0)


@st.composite
def matrices(draw: st.DrawFn, kind: str | None = None, width: int | None = None) -> np.ndarray:
    """Rows of values between runs of a few others, as padding is; also full ones, and empty ones."""
    rows, columns = draw(st.integers(1, 6)), draw(st.integers(1, 9)) if width is None else width
    dtype = np.dtype(kind or draw(st.sampled_from(KINDS)))
    some = [0, 1, 7] if dtype.kind in "iub" else [0.0, -0.0, 1.5, float("nan"), float("inf")]
    left, right = draw(st.sampled_from(some)), draw(st.sampled_from(some))
    made = np.empty((rows, columns), dtype)
    for row in made:
        begin = draw(st.integers(0, columns))
        end = draw(st.integers(begin, columns))
        row[:begin], row[end:] = left, right
        row[begin:end] = draw(st.lists(st.sampled_from(some), min_size=end - begin, max_size=end - begin))
    return made


def same(found: Any, wanted: np.ndarray) -> None:
    array = found.numpy()
    assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape)
    assert array.tobytes() == wanted.tobytes()


def sent(value: Any, protocol: int = 5) -> Any:
    """Returns a value as another process gets it, its arrays in memory that must not be written."""
    if protocol < 5:
        return pickle.loads(pickle.dumps(value, protocol=protocol))
    buffers: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(inside, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers])


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(matrices(), st.data())
def test_a_column_is_bit_for_bit_what_it_was(array: np.ndarray, data: st.DataObject) -> None:
    column = packed(torch.from_numpy(array.copy()))
    assert isinstance(column, Packed)
    assert (column.shape, column.dtype, column.nbytes) == (array.shape, array.dtype, array.nbytes)
    index = np.array(data.draw(st.lists(st.integers(0, len(array) - 1), max_size=8)), dtype=np.int64)
    for found, wanted in ((column, array), (column.rows(index), array[index])):
        for protocol in (4, 5):
            same(sent(found, protocol).tensor(), wanted)
        same(found.tensor(), wanted)
        last = data.draw(st.integers(0, array.shape[1]))
        assert_array_equal(found.nonzero(last), np.count_nonzero(wanted[:, wanted.shape[1] - last :], axis=1))
        assert found.last().tolist() == [max([0, *np.flatnonzero(row).tolist()]) for row in wanted]


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.lists(st.integers(0, 1), max_size=3)), min_size=1, max_size=5), st.data()
)
def test_a_matrix_is_packed_in_the_runs_of_its_mask(runs: list[tuple[int, list[int]]], data: st.DataObject) -> None:
    values, lengths = np.array([one for _, run in runs for one in run], np.int8), [len(run) for _, run in runs]
    starts = np.array([start for start, _ in runs])
    mask = Packed([Ragged(values, np.array(lengths), starts, 7, np.dtype(np.int64))])
    index = np.array(data.draw(st.lists(st.integers(0, len(runs) - 1), max_size=8)), dtype=np.int64)
    for column in (mask, mask.rows(index)):
        given = torch.randn(column.shape)
        found = column.masked(given)
        assert found is not None
        same(found.tensor(), given.masked_fill(column.tensor() == 0, 0.0).numpy())
    batch = Batch(range(len(runs)), {"mask": mask, "real": mask.tensor()})
    given = torch.randn(mask.shape)
    found, wanted = batch.masked(given, "mask"), batch.masked(given, "real")
    assert isinstance(found, Packed)
    assert isinstance(wanted, torch.Tensor)
    same(found.tensor(), wanted.numpy())
    assert batch.last("mask").tolist() == batch.last("real").tolist()


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5),
    st.sampled_from([(1, 0), (0, 1), (0, 0), (2, 3)]),
    st.integers(0, 1),
    st.data(),
)
def test_a_rule_and_parts_of_a_shared_array_are_matrices_like_any(
    runs: list[tuple[int, int, int]], rule: tuple[int, int], side: int, data: st.DataObject
) -> None:
    starts, lengths, gaps = (np.array(each) for each in zip(*runs, strict=True))
    first, step = rule
    wanted = np.full((len(runs), 9), side)
    for row, start, length in zip(wanted, starts, lengths, strict=True):
        row[start : start + length] = first + step * np.arange(length)
    right = np.full(len(runs), side)
    # The values of each row follow others, which are no part of the matrix.
    pieces = [np.append([0] * gap, row[at : at + n]) for row, (at, n, gap) in zip(wanted, runs, strict=True)]
    ends, values = np.cumsum(gaps + lengths), np.concatenate(pieces).astype(np.int8)
    shared = Ragged(values, lengths, starts, 9, np.dtype(np.int64), side, right, ends)
    index = np.array(data.draw(st.lists(st.integers(0, len(runs) - 1), max_size=8)), dtype=np.int64)
    last = data.draw(st.integers(0, 9))
    mask = Packed([Progression(1, 0, lengths, starts, 9)])
    for matrix in (Progression(first, step, lengths, starts, 9, side, right), shared):
        for column, rows in ((Packed([matrix]), slice(None)), (Packed([matrix]).rows(index), index)):
            for found in (column, sent(column, 4), sent(column), column.trimmed()):
                same(found.tensor(), wanted[rows])
                assert_array_equal(found.nonzero(last), np.count_nonzero(wanted[rows][:, 9 - last :], axis=1))
                assert found.last().tolist() == [max([0, *np.flatnonzero(row).tolist()]) for row in wanted[rows]]
                ones = mask if found is column and column.index is None else mask.rows(np.arange(len(runs))[rows])
                assert_array_equal(found.within(ones), wanted[rows][ones.array() != 0])
        masked = Packed([matrix]).masked(torch.ones(len(runs), 9))
        assert (masked is None) == bool(side)
        if masked is not None:
            same(masked.tensor(), (wanted != 0).astype(np.float32))


def test_all_rows_in_order_stay_parts_of_a_shared_array() -> None:
    lengths, ends = np.array([1, 2]), np.array([3, 9])
    column = Packed([Ragged(np.arange(9), lengths, np.zeros(2, int), 3, np.dtype(np.int64), ends=ends)])
    assert column.rows(np.arange(2)).sources == column.sources
    assert column.rows(np.array([1, 0])).tensor().tolist() == [[7, 8, 0], [2, 0, 0]]


def test_no_matrix_is_packed_in_the_runs_of_one_with_values_in_its_padding() -> None:
    ones = packed((torch.arange(1000) < torch.arange(64)[:, None] * 10).long())
    assert ones.masked(torch.zeros(64, 1000)) is None


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(st.sampled_from(KINDS).flatmap(lambda kind: st.lists(matrices(kind, 5), min_size=1, max_size=4)), st.data())
def test_rows_of_several_columns_are_joined_without_reading_them(arrays: list[np.ndarray], data: st.DataObject) -> None:
    whole = np.concatenate(arrays)
    index = st.lists(st.integers(0, len(whole) - 1), max_size=8)
    chosen, again = (np.array(data.draw(index), dtype=np.int64) for _ in range(2))
    column = Packed.concat([packed(torch.from_numpy(array.copy())) for array in arrays])
    assert column is not None
    same(column.tensor(), whole)
    same(sent(column.rows(chosen)).tensor(), whole[chosen])
    twice = Packed.concat([column.rows(chosen), column, column.rows(again)])
    assert twice is not None
    same(twice.tensor(), np.concatenate([whole[chosen], whole, whole[again]]))
    assert_array_equal(twice.nonzero(5)[: len(chosen)], np.count_nonzero(whole[chosen], axis=1))


def test_columns_of_different_widths_or_types_are_not_joined() -> None:
    one = packed(torch.zeros(2, 3))
    assert Packed.concat([one, packed(torch.zeros(2, 4))]) is None
    assert Packed.concat([one, packed(torch.zeros(2, 3, dtype=torch.float64))]) is None


def test_masks_cost_no_values_and_tokens_as_few_bytes_as_they_need() -> None:
    mask = (torch.arange(1000) < torch.arange(64)[:, None] * 10).long()
    (source,) = packed(mask).sources
    assert isinstance(source, Ragged)
    assert len(source.values) == 0
    (source,) = packed(mask * torch.arange(1, 1001)).sources
    assert isinstance(source, Ragged)
    assert source.values.dtype == np.int16
    assert len(source.values) <= int(mask.sum())
    assert isinstance(packed(torch.randn(64, 1000)).sources[0], Dense), "nothing to leave out"


@pytest.mark.parametrize(
    ("values", "kind"), [([-128, 127], "int8"), ([-129], "int16"), ([2**31], "int64"), ([], "int64")]
)
def test_integers_are_stored_in_the_smallest_type(values: list[int], kind: str) -> None:
    assert narrowed(np.array(values, dtype=np.int64)).dtype == kind


def test_what_lies_within_a_mask_is_read_without_padding() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 0]])
    tokens = torch.tensor([[9, 5, 9, 9], [1, 2, 9, 9]])  # a run of tokens ends with the token of the padding
    flat = Ragged(np.array([5, 9, 1, 2, 9], np.int8), np.array([2, 3]), np.array([1, 0]), 4, np.dtype(np.int64), 9, 9)
    ones = Ragged(np.ones(5, np.int8), flat.lengths, flat.starts, 4, np.dtype(np.int64))
    columns = {"tokens": Packed([flat]), "mask": Packed([ones]), "other": tokens * 10, "real": mask}
    batch = Batch([0, 1], columns)
    for rows, wanted in ((batch, [5, 9, 1, 2, 9]), (batch.select([1, 0]), [1, 2, 9, 5, 9])):
        assert rows.within("tokens", "mask").tolist() == wanted
        assert isinstance(dict(rows.tensors.raw())["tokens"], Packed), "it is not read"
        assert rows.within("other", "mask").tolist() == [10 * token for token in wanted]
        assert rows.within("tokens", "real").tolist() == wanted
    assert sent(Batch([0, 1], {"tokens": tokens, "mask": mask})).within("tokens", "mask").tolist() == [5, 9, 1, 2, 9]


class Loaded:
    """Counts how often objects of its kind were loaded in this process."""

    count = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        type(self).count += 1
        self.__dict__ |= state

    def __init__(self, at: int) -> None:
        self.at = at


def test_objects_are_loaded_once_and_only_if_they_are_read() -> None:
    batch = Batch([0, 0, 1, 2], {"one": [Loaded(at) for at in range(4)], "text": list("abcd")})
    Loaded.count = 0
    got = sent(sent(batch))
    some = Batch.concat([got.select([2]), got.select([0])])
    assert list(some["text"]) == ["d", "a", "b"]
    assert Loaded.count == 0
    assert [each.at for each in some["one"]] == [3, 0, 1]
    assert [each.at for each in got["one"]] == [0, 1, 2, 3]
    assert Loaded.count == 4
    got["one"][1].at = 7  # what a stage returns holds what it did to its objects
    assert [each.at for each in sent(got.select([0]))["one"]] == [0, 7]
    assert [each.at for each in sent(some)["one"]] == [3, 0, 7]


def test_each_response_gets_a_copy_of_its_prompts_objects() -> None:
    chats = [[{"role": "user", "content": text}] for text in "ab"]
    for prompts in (Batch([0, 1], {"chat": chats}), sent(Batch([0, 1], {"chat": chats}))):
        for rows in (prompts.repeat(2), sent(prompts.repeat(2)), sent(prompts.repeat(2).select([1, 0])).select([0, 1])):
            rows["chat"][0][0]["content"] = "c"
            assert [chat[0]["content"] for chat in rows["chat"]] == ["c", "a", "b", "b"]
    assert chats[0][0]["content"] == "a"


def test_a_column_of_numbers_stays_an_array() -> None:
    numbers = np.arange(3.0)
    assert objects(numbers) is numbers


def test_readers_of_one_column_do_not_see_what_another_one_writes() -> None:
    got = sent(Batch([0, 1], {"x": torch.tensor([[1, 0, 0], [2, 0, 0]])}))
    first, second = got.select([1, 0]), got.only("x")
    first["x"].zero_()
    assert second["x"].tolist() == got["x"].tolist() == [[1, 0, 0], [2, 0, 0]]


def test_a_batch_of_an_earlier_version_can_be_read() -> None:
    batch = Batch.__new__(Batch)
    text = np.array(["a", "b"], dtype=object)
    batch.__setstate__((np.array([0, 1]), {"x": np.array([3, 4])}, {"text": text}, {"weights_version": 1}))
    assert (batch["x"].tolist(), list(batch["text"]), batch.ids) == ([3, 4], ["a", "b"], (0, 1))


def test_masks_of_any_type_have_a_last_value() -> None:
    for kind in (torch.int64, torch.bool, torch.bfloat16):
        assert Batch([0, 1], {"mask": torch.tensor([[0, 1, 0], [0, 0, 0]], dtype=kind)}).last("mask").tolist() == [1, 0]
    asked = torch.ones(1, 2, requires_grad=True)
    assert Batch([0], {"mask": asked.detach()}).masked(asked, "mask").grad_fn is not None
