"""Batch: whole groups, never torn, never twice."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.batch import Batch
from dataflow.errors import DataflowError


def batch(groups: int = 4, n: int = 2, meta: dict | None = None) -> Batch:
    rows = groups * n
    return Batch(
        np.repeat(np.arange(groups), n),
        {"score": torch.arange(rows, dtype=torch.float32), "text": [f"row {i}" for i in range(rows)]},
        meta,
    )


def test_columns_are_tensors_and_objects():
    b = batch()
    assert (len(b), b.ids, b.names) == (8, (0, 1, 2, 3), ("score", "text"))
    assert "text" in b
    assert "other" not in b
    assert b["text"].dtype == object
    assert b["score"][3] == 3.0
    assert repr(b) == "Batch(4 groups, 8 rows: score, text)"
    lists = Batch([0, 1], {"prompt_ids": [[1, 2], [3, 4]]})["prompt_ids"]
    assert lists.shape == (2,), "lists of one length stay objects"
    empty = Batch([], {"a": torch.zeros(0)})
    assert empty.ids == empty.select([]).ids == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Batch([0, 0], {"a": torch.zeros(3)}), "column 'a' has 3 rows, the batch has 2"),
        (lambda: Batch([0, 1, 0]), "rows of group 0 are not adjacent"),
        (lambda: batch()["scores"], "no column 'scores'; it has score, text"),
        (lambda: batch().select([0, 9]), "no group 9; it holds 4 groups"),
        (lambda: batch().select([1, 1]), "selected twice"),
        (lambda: batch().split(3), "3 parts do not divide 4 groups"),
        (lambda: batch().merge(batch(3)), "cannot merge .* their groups differ"),
        (lambda: Batch.concat([]), "nothing to concatenate"),
        (lambda: Batch.concat([Batch([0]), Batch([0])]), "have the same group"),
        (lambda: Batch([1.2, 1.7]), r"group ids are whole numbers, not .*1\.2"),
        (lambda: batch().rows([1.9]), "rows are chosen by their numbers, or by a mask of 8 bools"),
        (lambda: batch().rows([True]), "rows are chosen by their numbers, or by a mask of 8 bools"),
        (lambda: batch().last("score"), r"column 'score' has the shape \(8,\), not \[rows, width\]"),
        (
            lambda: Batch.concat([Batch([0], {"a": [1]}), Batch([1], {"a": torch.ones(1)})]),
            "cannot concatenate columns",
        ),
    ],
)
def test_a_wrong_batch_is_an_error_that_names_the_cause(make, message):
    with pytest.raises(DataflowError, match=message):
        make()


def test_select_repeat_merge_and_like_make_new_batches():
    b = batch(meta={"weights_version": 3})
    chosen = b.select([2, 0])
    assert chosen.ids == (2, 0)
    assert chosen["score"].tolist() == [4.0, 5.0, 0.0, 1.0]
    assert list(chosen["text"]) == ["row 4", "row 5", "row 0", "row 1"]
    repeated = Batch([0, 1], {"prompt": ["a", "b"]}).repeat(3)
    assert list(repeated["prompt"]) == ["a"] * 3 + ["b"] * 3
    assert repeated.ids == (0, 1)
    extra = b.like(advantage=torch.ones(8))
    assert extra.names == ("advantage",)
    both = b.merge(extra)
    assert set(both.names) == {"score", "text", "advantage"}
    assert both.meta == {"weights_version": 3}
    assert b.names == ("score", "text")  # never changed in place


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.randoms(use_true_random=False))
def test_split_and_concat_are_inverse(groups, n, dice):
    b = batch(groups, n, {"weights_version": 1})
    parts = dice.choice([d for d in range(1, groups + 1) if groups % d == 0])
    pieces = b.split(parts)
    assert [len(p.ids) for p in pieces] == [groups // parts] * parts
    dice.shuffle(pieces)
    whole = Batch.concat(pieces).select(range(groups))
    assert whole["score"].tolist() == b["score"].tolist()
    assert list(whole["text"]) == list(b["text"])
    assert whole.meta == b.meta


@pytest.mark.heavy
def test_it_is_a_dataproto_at_verls_edge():
    b = batch(meta={"weights_version": 2})
    data = b.to_dataproto()
    assert list(data.non_tensor_batch["uid"]) == ["0", "0", "1", "1", "2", "2", "3", "3"]
    assert data.batch["score"].tolist() == b["score"].tolist()
    assert data.meta_info == b.meta


def received(sent: Batch) -> tuple[Batch, list[pickle.PickleBuffer]]:
    """Returns a batch as another process gets it of Ray: its arrays are shared memory that must not be written."""
    buffers: list[pickle.PickleBuffer] = []
    inside = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(inside, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers]), buffers


def test_tensors_travel_outside_of_the_pickle_and_are_copied_when_they_are_read():
    ids, mask = torch.arange(6).reshape(3, 2), torch.ones(3, 2, dtype=torch.bool)
    sent = Batch([0, 0, 1], {"ids": ids, "mask": mask, "text": ["a", "b", "c"]}, {"weights_version": 3})
    got, buffers = received(sent)
    assert {len(buffer.raw()) for buffer in buffers} >= {ids.nbytes, mask.nbytes}
    assert (got.names, got.meta, got.ids) == (sent.names, sent.meta, sent.ids)
    assert "ids" in got
    got["ids"][0, 0] = 9  # in shared memory this would kill the process
    got.tensors["mask"].zero_()
    assert got["ids"].tolist() == [[9, 1], [2, 3], [4, 5]], "the copy is made once"
    assert not got["mask"].any()
    again, _buffers = received(got)
    assert again["ids"].tolist() == got["ids"].tolist()
    assert sent["ids"].tolist() == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    "column",
    [
        torch.ones(2, 3, dtype=torch.bfloat16),
        torch.ones(2, 3, requires_grad=True),
        torch.ones(2, 3).to_sparse(),
        torch.arange(12).reshape(6, 2).T,
        torch.arange(12).reshape(6, 2)[2:4],
        torch.zeros(2, 0),
        torch.tensor([1.5, -2.0], dtype=torch.float16),
    ],
    ids=["bfloat16", "grad", "sparse", "transposed", "slice", "empty", "half"],
)
def test_every_kind_of_tensor_comes_back_as_it_was(column):
    for got in (
        received(Batch([0, 1], {"x": column}))[0]["x"],
        pickle.loads(pickle.dumps(Batch([0, 1], {"x": column})))["x"],
    ):
        assert (got.dtype, got.shape, got.layout, got.requires_grad) == (
            column.dtype,
            column.shape,
            column.layout,
            column.requires_grad,
        )
        assert torch.equal(got.to_dense(), column.to_dense())


def test_what_comes_of_a_received_batch_is_a_batch_like_any_other():
    got, _buffers = received(batch(meta={"a": 1}))
    assert got.select([2, 0])["score"].tolist() == [4.0, 5.0, 0.0, 1.0]
    assert list(got["text"])[:2] == ["row 0", "row 1"]
    assert got.merge(got.like(more=torch.zeros(8)))["more"].tolist() == [0.0] * 8
    assert Batch.concat([got, batch(6).select([4, 5])]).ids == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list])
def test_rows_may_be_chosen_by_a_mask(kind):
    mask = kind([False, True, True])
    three = Batch([0, 1, 2], {"o": ["a", "b", "c"], "t": torch.arange(3)})
    for chosen in (three.rows(mask), three.singles(mask)):
        assert (list(chosen["o"]), chosen["t"].tolist()) == (["b", "c"], [1, 2])
    assert three.rows(mask).ids == (1, 2)
    assert three.singles(mask).ids == (0, 1)


def test_a_batch_keeps_its_own_group_ids():
    given = np.array([0, 0, 1])
    own = Batch(given)
    assert own.ids == (0, 1)
    given[:] = [0, 1, 2]
    assert own.sizes == {0: 2, 1: 1}


def test_columns_of_several_types_are_joined_as_they_are():
    columns = [np.array([2**60 + 1]), np.array([0.5]), np.array(["x"], dtype=object)]
    whole = Batch.concat([Batch([at], {"mixed": column}) for at, column in enumerate(columns)])
    assert list(whole["mixed"]) == [2**60 + 1, 0.5, "x"]
