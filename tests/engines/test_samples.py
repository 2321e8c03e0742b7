"""Samples whose log-probs or masks are not those of their tokens are refused: they would shift those of other rows."""

from __future__ import annotations

from typing import Any

import pytest

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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"log_probs": [-1.0, -2.0]}, "sample 1 of group 3 has 2 log-probs for 3 tokens"),
        ({"log_probs": [-1.0] * 4}, "has 4 log-probs for 3 tokens"),
        ({"mask": [0, 0]}, "has 2 values of a mask for 3 tokens"),
        ({"mask": [1] * 5}, "has 5 values of a mask for 3 tokens"),
    ],
)
def test_others_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataflowError, match=message):
        to_batch(PROMPTS, [sample(0), sample(1, **changed)], 6, None, 0)
