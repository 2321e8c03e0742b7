"""What columns take on their way, and that nobody sees what another one changes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.usercode.pickling import dumps

WIDE = 1024


def sent(batch: Batch, protocol: int = 5) -> Batch:
    """The batch as another process gets it."""
    return pickle.loads(pickle.dumps(batch, protocol=protocol))


def ragged(groups: list[int], rows: int = 4) -> Batch:
    """Rows of a few tokens in a wide matrix, each another one."""
    tokens = torch.zeros(len(groups) * rows, WIDE, dtype=torch.int64)
    for row, group in enumerate(np.repeat(groups, rows).tolist()):
        tokens[row, : 5 + row % 2] = torch.arange(1, 6 + row % 2) + group
    return Batch(np.repeat(groups, rows), {"tokens": tokens})


def test_parts_that_are_put_in_order_stay_without_padding() -> None:
    parts = [sent(ragged([at, at + 8])) for at in range(8)]
    order = list(range(16))
    whole = Batch.concat(parts).select(order)
    assert len(pickle.dumps(whole)) < 2 * sum(len(pickle.dumps(part)) for part in parts)
    assert torch.equal(sent(whole)["tokens"], Batch.concat([ragged([at]) for at in order])["tokens"])
    mixed = whole.select(order[::-3])
    assert torch.equal(sent(mixed)["tokens"], Batch.concat([ragged([at]) for at in order[::-3]])["tokens"])


def test_a_tensor_of_two_names_travels_once_and_is_two_tensors_then() -> None:
    values = torch.rand(64, WIDE)
    batch = Batch(range(64), {"advantages": values, "returns": values})
    assert len(pickle.dumps(batch)) < 1.1 * len(pickle.dumps(batch.only("returns")))
    found = sent(batch)
    found["advantages"].zero_()
    assert torch.equal(found["returns"], values)


@pytest.mark.parametrize("chosen", [10, 5, 3, 1])
def test_an_object_of_several_rows_travels_once(chosen: int) -> None:
    prompts = sent(Batch(range(10), {"image": [np.full(2_000, at, dtype=np.uint8) for at in range(10)]}))
    rows = prompts.repeat(8).select(range(chosen))
    assert len(pickle.dumps(rows)) < 10 * 2_000 + 4_000
    got = sent(rows)["image"]
    assert [int(image[0]) for image in got] == [at for at in range(chosen) for _ in range(8)]
    got[0][:] = 77
    assert int(got[1][0]) == 0, "each row has its own"


@pytest.mark.parametrize("made", [lambda b: b, sent], ids=["made here", "sent"])
def test_a_change_to_a_batch_shows_in_none_that_was_made_of_it(made: Any) -> None:
    batch = made(Batch([0, 1, 2], {"chat": [["a"], ["b"], ["c"]], "text": ["x", "y", "z"], "t": torch.ones(3, 2)}))
    repeated, half, one = batch.repeat(2), batch.select([0, 2]), Batch.concat([batch])
    batch["chat"][0].append("more")
    batch["text"][:] = ["X"] * 3
    batch["t"].zero_()
    batch.meta["m"] = 1
    assert [list(chat) for chat in repeated["chat"]] == [["a"], ["a"], ["b"], ["b"], ["c"], ["c"]]
    assert list(half["text"]) == ["x", "z"]
    assert (list(one["text"]), one["t"].sum().item(), one.meta) == (["x", "y", "z"], 6.0, {})


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_arrays_among_objects_can_be_written_to_by_every_protocol(protocol: int) -> None:
    batch = Batch([0, 1], {"boxes": [np.zeros((0, 4)), np.ones((2, 4))]})
    got = sent(batch, protocol)
    assert [box.shape for box in got["boxes"]] == [(0, 4), (2, 4)]
    got["boxes"][1][0] = 7.0


def test_a_deep_copy_of_a_few_rows_keeps_no_others() -> None:
    few = sent(ragged(list(range(50)))).select([7])
    assert len(few.unread["tokens"].sources[0]) == 200
    own = copy.deepcopy(few)
    assert len(own.unread["tokens"].sources[0]) == 4
    assert torch.equal(own["tokens"], few["tokens"])


def test_a_shallow_copy_reads_and_pickles_nothing() -> None:
    lock = [object(), lambda: None]
    batch = Batch([0, 1], {"locks": lock, "t": torch.ones(2)})
    other = copy.copy(batch)
    assert list(other["locks"]) == lock
    assert other.ids == batch.ids


def test_ids_follow_the_groups() -> None:
    batch = Batch([0, 0, 1], {"x": ["a", "b", "c"]})
    batch.groups = batch.groups + 10
    assert batch.ids == sent(batch).ids == (10, 11)


@pytest.mark.parametrize("made", [lambda b: b, sent], ids=["made here", "sent"])
def test_counting_among_more_values_than_there_are_counts_all(made: Any) -> None:
    assert made(ragged([1])).nonzero("tokens", 10 * WIDE).tolist() == [5, 6, 5, 6]


def test_sizes_of_every_kind_of_tensor_are_known() -> None:
    batch = Batch([0, 1], {"s": torch.eye(2).to_sparse()})
    assert batch.nbytes == 16


@pytest.mark.slow
def test_objects_travel_where_cloudpickle_is_not_installed() -> None:
    code = """
import sys, pickle
sys.modules["cloudpickle"] = None
from dataflow.batch import Batch
from dataflow.usercode.pickling import dumps
assert list(pickle.loads(pickle.dumps(Batch([0, 1], {"text": [["a"], ["b"]]})))["text"]) == [["a"], ["b"]]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_readers_of_rows_share_no_objects_that_count() -> None:
    def counter() -> Callable[[], int]:
        seen = [0]

        def count() -> int:
            seen[0] += 1
            return seen[0]

        return count

    arrived = pickle.loads(dumps(Batch([0], {"extra": [{"count": counter()}]})))
    found = [arrived.repeat(2).rows(np.array([at]))["extra"][0]["count"]() for at in (0, 1)]
    assert found == [1, 1]
