"""Several rewards as one score: by hand, with samples that were dropped, and weights that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.errors import ConfigError, DataError
from dataflow.graph import Read, TaskInfo
from dataflow.stages.combine import combine, combine_stage

NAN = float("nan")
BOTH = ("judge", "rule")


def responses(texts: list[str], lengths: list[int]) -> Batch:
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    return Batch(np.repeat(np.arange(len(texts) // 2), 2), {"response_mask": mask, "response_text": texts})


def rewards(batch: Batch, scores: list[float], **columns: Any) -> Batch:
    return batch.like(score=torch.tensor(scores), **columns)


def test_a_score_is_the_weighted_sum_of_its_parts() -> None:
    batch, task = responses(["#### 4", "#### 5"], [2, 4]), TaskInfo(step=1)
    judged = rewards(batch, [0.6, 1.0], request_tries=torch.tensor([1, 2]), explanation=["x", "y"])
    ruled = rewards(batch, [1.0, 0.0], request_tries=torch.tensor([3, 3]), explanation=["p", "q"])
    weights = {"judge": 0.5, "rule": 2.0, "length": 0.1}
    found = combine(batch, judged, ruled, sources=BOTH, weights=weights, length=4, task=task)
    assert found["score"].tolist() == pytest.approx([0.3 + 2.0 - 0.05, 0.5 + 0.0 - 0.1])
    assert found["judge_score"].tolist() == pytest.approx([0.6, 1.0])
    assert found["rule_score"].tolist() == [1.0, 0.0]
    assert found["length_penalty"].tolist() == [0.5, 1.0]
    assert (list(found["explanation"]), list(found["rule_explanation"])) == (["x", "y"], ["p", "q"])
    assert found["request_tries"].tolist() == [1, 2]
    assert "rule_request_tries" not in found
    means = {"reward/rule/mean": 0.5, "reward/judge/mean": 0.8, "reward/length/mean": 0.75}
    assert task.metrics == pytest.approx({**means, "reward/combined/mean": (2.25 + 0.4) / 2})
    # Sums that are equal but for rounding become equal scores.
    equal = [rewards(batch, [0.1, 0.0]), rewards(batch, [0.2, 0.3])]
    found = combine(batch, *equal, sources=BOTH, weights=dict.fromkeys(BOTH, 1.0), length=4, task=TaskInfo(step=1))
    assert len(set(found["score"].tolist())) == 1


@pytest.mark.parametrize(("score", "weight", "value"), [(1.0, 1e16, "1e\\+16"), (NAN, 1.0, "nan")])
def test_a_combined_score_that_is_not_finite_is_refused(score: float, weight: float, value: str) -> None:
    batch = responses(["a", "b"], [1, 1])
    task, given = TaskInfo(step=3, stage="combine"), (rewards(batch, [0.0, score]), rewards(batch, [0.0, 0.0]))
    with pytest.raises(DataError, match=rf"^combine\[3\]: the combined score of sample 1 of group 0 is {value}"):
        combine(batch, *given, sources=BOTH, weights={"judge": weight, "rule": 1.0}, length=4, task=task)


def test_a_sample_that_one_source_dropped_is_dropped_and_counts_in_no_mean() -> None:
    batch, task = responses(["a", "b", "c", "d"], [1] * 4), TaskInfo(step=1)
    judged = rewards(batch, [1.0, NAN, 2.0, 3.0], kept=torch.tensor([True, False, True, True]))
    ruled = rewards(batch, [1.0, 1.0, NAN, 2.0], kept=torch.tensor([True, True, False, True]))
    weights = {"judge": 1.0, "rule": 1.0}
    found = combine(batch, judged, ruled, sources=BOTH, weights=weights, length=4, task=task)
    assert found["kept"].tolist() == [True, False, False, True]
    assert found["score"].isnan().tolist() == [False, True, True, False]
    assert task.metrics["reward/combined/mean"] == 3.5
    assert task.metrics["reward/judge/mean"] == 2.0


def test_the_stage_reads_a_field_of_each_agent() -> None:
    made = combine_stage({"judge": "reward", "taste": "style"}, weights={"judge": 1.0, "taste": 2.0}, length=8)
    assert made.reads == (Read("responses"), Read("rewards"), Read("style_rewards"))
    assert (made.writes, made.per) == (("scores",), "part")
    made.check()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"judge": 0.0, "rule": 1.0}, "weights.judge=0: its agent would be asked and paid for nothing"),
        ({"judge": 1.0}, "weights.rule=0: its agent would be asked"),
        ({"judge": 1.0, "rule": 1.0, "juge": 1.0}, "there is no reward 'juge'; did you mean 'judge'"),
        ({"judge": -1.0, "rule": 1.0}, "judge=-1; give a finite number of at least 0"),
        ({"judge": 1.0, "rule": 1.0, "length": NAN}, "length=nan"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        combine_stage({"judge": "reward", "rule": "rule"}, weights=weights, length=4)
    assert words in str(caught.value)
