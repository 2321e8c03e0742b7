"""Numbers from which no finite advantage follows are refused, with their sample."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dataflow.algorithms.estimators import ESTIMATORS
from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.errors import DataError
from dataflow.graph import TaskInfo
from dataflow.stages.advantage import advantage, advantage_stage, check_finite
from dataflow.stages.distill import distill_advantage
from dataflow.usercode.numeric import LARGEST_SCORE

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]
R = 3


def responses(rows: int = 4, tokens: int = R) -> Batch:
    mask = (torch.arange(tokens) < torch.arange(1, rows + 1)[:, None].clamp(max=tokens)).long()
    whole = torch.cat([torch.ones(rows, 2, dtype=torch.long), mask], dim=1)
    columns = {"prompts": whole[:, :2], "responses": mask, "attention_mask": whole, "response_mask": mask}
    return Batch([row // 2 for row in range(rows)], columns, {"weights_version": 0})


def test_the_first_number_that_counts_is_named() -> None:
    batch, task = responses(), TaskInfo(step=2, stage="advantage")
    values = torch.zeros(4, R)
    values[0, 1] = math.nan  # behind the end of the first response
    values[3, 0] = -math.inf
    mask = batch["response_mask"]
    with pytest.raises(DataError, match=r"^advantage\[2\]: the value of sample 1 of group 1 is -inf; it must be a fin"):
        check_finite(values, "the value", batch, task, counts=mask)
    values[3, 0] = 3e38
    check_finite(values, "the value", batch, task, counts=mask)
    with pytest.raises(DataError, match=r"of sample 0 of group 0 is nan; it must be a finite number\.$"):
        check_finite(values, "the value", batch, task)


@pytest.mark.parametrize("score", [math.nan, math.inf, float(torch.finfo(torch.float32).min), 2 * LARGEST_SCORE])
def test_a_score_of_a_stage_of_ones_own_is_refused(score: float) -> None:
    batch, task = responses(), TaskInfo(step=1, stage="advantage")
    rewards = batch.like(score=torch.tensor([0.0, 1.0, 0.0, score]))
    with pytest.raises(DataError, match=r"^advantage\[1\]: the score of sample 1 of group 1 is "):
        advantage(batch, rewards, algorithm=AlgorithmConfig(), task=task)
    kept = rewards.merge(rewards.like(kept=torch.tensor([True, True, False, False])))
    assert advantage(batch, kept, algorithm=AlgorithmConfig(), task=task)["advantages"].isfinite().all()


@pytest.mark.parametrize("name", [name for name, found in ESTIMATORS.items() if not found.needs])
def test_the_advantages_of_the_largest_scores_are_finite_and_teach(name: str) -> None:
    """The largest score is chosen such that no square overflows, by which all advantages would become 0 or NaN."""
    batch = responses(8, 5000)
    batch = batch.merge(batch.like(response_mask=torch.ones(8, 5000, dtype=torch.long)))
    batch = batch.merge(batch.like(attention_mask=torch.ones(8, 5002, dtype=torch.long)))
    rewards = batch.like(score=torch.tensor([LARGEST_SCORE, -LARGEST_SCORE] * 4))
    found = advantage(batch, rewards, algorithm=AlgorithmConfig(adv_estimator=name), task=TaskInfo(step=1))
    assert found["advantages"].isfinite().all()
    assert found["advantages"].abs().max() > 0.1


@pytest.mark.parametrize(
    ("name", "field", "columns", "what"),
    [
        ("gae", "values", {"values": "matrix"}, "the critic's value"),
        ("remax", "reward_baselines", {"reward_baselines": "row"}, "the score of the greedy response"),
        ("grpo", "kl_penalty", {"kl_penalty": "matrix"}, "the KL penalty"),
    ],
)
def test_what_else_an_estimator_reads_is_checked(name: str, field: str, columns: dict[str, str], what: str) -> None:
    options = AlgorithmConfig(adv_estimator=name, use_kl_in_reward=field == "kl_penalty")
    batch, task = responses(), TaskInfo(step=1, stage="advantage")
    made: dict[str, Any] = {}
    for column, shape in columns.items():
        made[column] = torch.zeros(4, R) if shape == "matrix" else torch.zeros(4)
        made[column][2] = math.nan
    run = advantage_stage(options)
    with pytest.raises(DataError, match=rf"^advantage\[1\]: {what} of sample 0 of group 1 is nan"):
        run.fn(batch, batch.like(score=torch.ones(4)), batch.like(**made), task=task, **run.services)


def test_a_teachers_log_prob_is_checked() -> None:
    batch, task = responses(), TaskInfo(step=1, stage="distill_advantage")
    taught = torch.zeros(4, R)
    taught[1, 0] = -math.inf
    with pytest.raises(DataError, match="the teacher's log-prob of sample 1 of group 0 is -inf"):
        distill_advantage(
            batch, batch.like(old_log_probs=torch.zeros(4, R)), batch.like(teacher_log_probs=taught), task=task
        )
