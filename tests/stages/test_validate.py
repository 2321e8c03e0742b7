"""Evaluation by a rule, and the mean scores of any evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dataflow.batch import Batch
from dataflow.graph import TaskInfo
from dataflow.rewards.gsm8k import compute_score
from dataflow.stages.validate import mean_scores, val_check


def answers(texts: list[str], n: int = 2, **columns: Any) -> Batch:
    groups = np.repeat(np.arange(len(texts) // n), n)
    known = {"data_source": ["a"] * len(texts), "ground_truth": ["4"] * len(texts), "response_text": texts}
    return Batch(groups, {**known, **columns})


def test_a_rule_scores_each_response_and_logs_the_mean_by_source() -> None:
    task = TaskInfo(step=1)
    batch = answers(["#### 4", "#### 5", "#### 4", "#### 4"], data_source=["a", "a", "b", "b"])
    scores = val_check(batch, compute_score=compute_score, task=task)
    assert scores["score"].tolist() == [1.0, 0.0, 1.0, 1.0]
    right = {"val-aux/score": 0.75, "val-aux/accuracy": 0.75}
    assert task.metrics == {"val-core/a/reward/mean@2": 0.5, "val-core/b/reward/mean@2": 1.0, **right}


def test_sources_count_by_their_samples_and_a_mean_of_other_scores_is_no_accuracy() -> None:
    batch = answers(["x"] * 4, n=1, data_source=["a", "b", "b", "b"])
    found = mean_scores(batch, [1.0, 0.0, 0.0, 0.5])
    assert found == pytest.approx(
        {"val-core/a/reward/mean@1": 1.0, "val-core/b/reward/mean@1": 0.5 / 3, "val-aux/score": 1.5 / 4}
    )


def test_a_rule_that_changes_extra_info_changes_its_own_copy() -> None:
    seen = []

    def rule(extra_info: dict[str, Any], **_given: Any) -> int:
        seen.append(list(extra_info["tags"]))
        extra_info["tags"].append("seen")
        return 1

    info = {"tags": ["a"]}
    val_check(answers(["x", "y"], extra_info=[info, info]), compute_score=rule, task=TaskInfo(step=1))
    assert seen == [["a"], ["a"]]
    assert info == {"tags": ["a"]}


def test_scores_that_are_missing_are_left_out_of_the_means() -> None:
    batch = answers(["x"] * 4, data_source=["a", "a", "b", "b"])
    found = mean_scores(batch, [1.0, float("nan"), float("nan"), float("nan")])
    assert found == {"val-core/a/reward/mean@2": 1.0, "val-aux/score": 1.0, "val-aux/accuracy": 1.0}
