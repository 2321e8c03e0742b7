"""Several rewards as one score: by hand, with samples that were dropped, and weights that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.errors import ConfigError
from dataflow.graph import TaskInfo
from dataflow.rewards.user.gsm8k import compute_score
from dataflow.stages.combine import check_weights, combine, rule_score

NAN = float("nan")


def responses(texts: list[str], lengths: list[int]) -> Batch:
    mask = (torch.arange(4) < torch.tensor(lengths)[:, None]).long()
    columns = {"response_mask": mask, "response_text": texts}
    known = {"data_source": ["gsm8k"] * len(texts), "ground_truth": ["4"] * len(texts)}
    return Batch(np.repeat(np.arange(len(texts) // 2), 2), {**columns, **known})


def rewards(batch: Batch, scores: list[float], **columns: Any) -> Batch:
    return batch.like(score=torch.tensor(scores), **columns)


def test_a_score_is_the_weighted_sum_of_its_parts() -> None:
    batch, task = responses(["#### 4", "#### 5"], [2, 4]), TaskInfo(step=1)
    ruled = rule_score(batch, compute_score=compute_score, task=task)
    weights = {"judge": 0.5, "rule": 2.0, "length": 0.1}
    found = combine(batch, rewards(batch, [0.6, 1.0]), ruled, weights=weights, length=4, task=task)
    assert found["score"].tolist() == pytest.approx([0.3 + 2.0 - 0.05, 0.5 + 0.0 - 0.1])
    assert found["judge_score"].tolist() == pytest.approx([0.6, 1.0])
    assert found["rule_score"].tolist() == [1.0, 0.0]
    assert found["length_penalty"].tolist() == [0.5, 1.0]
    means = {"reward/rule/mean": 0.5, "reward/judge/mean": 0.8, "reward/length/mean": 0.75}
    assert task.metrics == pytest.approx({**means, "reward/combined/mean": (2.25 + 0.4) / 2})


def test_without_a_rule_the_judge_counts_alone() -> None:
    batch = responses(["a", "b"], [1, 1])
    found = combine(batch, rewards(batch, [1.0, 3.0]), weights={"judge": 2.0}, length=4, task=TaskInfo(step=1))
    assert found["score"].tolist() == [2.0, 6.0]
    assert "rule_score" not in found


def test_a_dropped_sample_stays_dropped_and_counts_in_no_mean() -> None:
    batch, task = responses(["a", "b"], [1, 1]), TaskInfo(step=1)
    judged = rewards(batch, [1.0, NAN], kept=torch.tensor([True, False]))
    found = combine(batch, judged, weights={"judge": 1.0}, length=4, task=task)
    assert found["kept"].tolist() == [True, False]
    assert found["score"].isnan().tolist() == [False, True]
    assert task.metrics["reward/combined/mean"] == 1.0


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"judge": 0.0, "rule": 0.0, "length": 1.0}, "neither judge nor rule counts"),
        ({}, "neither judge nor rule counts"),
        ({"juge": 1.0}, "there is no reward 'juge'; did you mean 'judge'"),
        ({"judge": -1.0}, "judge=-1; give a finite number of at least 0"),
        ({"judge": NAN}, "judge=nan"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_weights(weights)
    assert words in str(caught.value)
