"""Samples whose log-probs or masks are not those of their tokens are refused: they would shift those of other rows."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.engines.base import Sample
from dataflow.engines.samples import to_batch
from dataflow.errors import DataflowError

PROMPTS = Batch([3], {"prompt_ids": [[1, 2]]})


def sample(index: int, **changed: Any) -> Sample:
    given: dict[str, Any] = {"tokens": [5, 6, 7], "log_probs": [-1.0, -2.0, -3.0], "text": "x", "mask": None} | changed
    return Sample(3, index, version=1, finish="stop", **given)


def test_a_mask_and_log_probs_lie_on_their_tokens() -> None:
    batch = to_batch(PROMPTS, [sample(0, mask=[1, 0, 1]), sample(1)], 4, None, 0)
    assert batch["response_mask"].tolist() == [[1, 0, 1, 0], [1, 1, 1, 0]]
    assert batch["rollout_log_probs"].tolist() == [[-1, -2, -3, 0], [-1, -2, -3, 0]]


def test_samples_are_the_same_rows_in_any_order_and_whether_compact_or_not() -> None:
    prompts = Batch([3, 1, 2], {"prompt_ids": [[1, 2], [400], [9, 8, 7]]})
    samples: list[Any] = [
        Sample(
            group, index, [5 + group] * (group + index), [-1.0] * (group + index), 1, reason, text=f"{group} {index}"
        )
        for group in (1, 3)
        for index, reason in ((1, "length"), (0, "stop"))
    ]
    batch = to_batch(prompts, samples, 5, None, 0)
    assert (batch.groups.tolist(), list(batch["response_text"])) == ([3, 3, 1, 1], ["3 0", "3 1", "1 0", "1 1"])
    assert list(batch["finish_reason"]) == ["stop", "length"] * 2
    assert batch["prompts"].tolist() == [[0, 1, 2]] * 2 + [[0, 0, 400]] * 2
    assert batch["responses"].tolist() == [[8, 8, 8, 0, 0], [8, 8, 8, 8, 0], [6, 0, 0, 0, 0], [6, 6, 0, 0, 0]]
    assert batch["input_ids"].tolist() == torch.cat([batch["prompts"], batch["responses"]], dim=1).tolist()
    assert batch["attention_mask"][3].tolist() == [0, 0, 1, 1, 1, 0, 0, 0]
    assert batch["position_ids"][1].tolist() == [0, 0, 1, 2, 3, 4, 5, 0]
    again = to_batch(prompts, [one.compact() for one in samples[::-1]], 5, None, 0)
    assert {name: list(map(str, again[name])) for name in again.names} == {
        name: list(map(str, batch[name])) for name in batch.names
    }


def test_tokens_of_prompts_and_responses_travel_once() -> None:
    samples = [Sample(3, index, [100 + index] * 2000, [-1.0] * 2000, 1, "stop", text="") for index in range(8)]
    batch = to_batch(PROMPTS, samples, 2048, None, 0).rows(range(8))
    bytes_of = 4 + 4 + 2 + 1 + 1  # a token, its log-prob, its position, two masks
    assert len(pickle.dumps(batch)) < 8 * 2002 * bytes_of + 8192


def test_groups_of_different_sizes_are_refused() -> None:
    for samples in ([sample(0), sample(0)], [sample(1)], [sample(0), sample(2)]):
        with pytest.raises(DataflowError, match="do not fill 1 groups alike"):
            to_batch(PROMPTS, samples, 4, None, 0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"log_probs": [-1.0, -2.0]}, "sample 1 of group 3 has 2 log-probs for 3 tokens"),
        ({"mask": [0, 0]}, "has 2 values of a mask for 3 tokens"),
    ],
)
def test_others_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataflowError, match=message):
        to_batch(PROMPTS, [sample(0), sample(1, **changed)], 6, None, 0)
