"""On-policy distillation: the parts that the teacher forms, and advantages computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.graph import TaskInfo
from dataflow.stages.distill import distill_advantage, teacher_log_prob


def responses(groups: int) -> Batch:
    mask = torch.ones(groups * 2, 3, dtype=torch.long)
    mask[0, 1:] = 0
    return Batch(np.repeat(np.arange(groups), 2), {"response_mask": mask, "tokens": torch.arange(groups * 2)})


class Teacher:
    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def log_probs(self, batch: Batch) -> Batch:
        self.asked.append(batch.ids)
        return batch.like(teacher_log_probs=-batch["tokens"].float()[:, None].expand(-1, 3))


@pytest.mark.parametrize("together", [None, 1, 2])
def test_the_teacher_scores_each_group_once_and_the_same_rows_at_a_time_however_a_step_is_split(
    together: int | None,
) -> None:
    for parts in (1, 2):
        teacher, scored = Teacher(), []
        for part in range(parts):
            task = TaskInfo(1, part=part, parts=parts, take=None if parts == 1 else 2)
            scored.append(teacher_log_prob(responses(4), teacher=teacher, together=together, task=task))
        whole = Batch.concat(scored)
        assert whole.ids == (0, 1, 2, 3)
        assert whole["teacher_log_probs"][:, 0].tolist() == [-float(row) for row in range(8)]
        size = together or 4 // parts
        assert teacher.asked == [tuple(range(at, at + size)) for at in range(0, 4, size)]


def test_an_advantage_is_how_much_likelier_the_teacher_finds_a_token() -> None:
    batch, task = responses(1), TaskInfo(step=1, stage="distill_advantage")
    old = torch.tensor([[-1.0, -5.0, -5.0], [-2.0, -1.0, -4.0]])
    taught = batch.like(teacher_log_probs=torch.tensor([[-3.0, -1.0, -1.0], [-1.0, -1.0, -2.0]]))
    result = distill_advantage(batch, batch.like(old_log_probs=old), taught, task=task)
    assert result["advantages"].tolist() == [[-2.0, 0.0, 0.0], [1.0, 0.0, 2.0]], "0 after the end"
    assert torch.equal(result["returns"], result["advantages"])
    assert task.metrics == pytest.approx({"distill/reverse_kl": -1 / 4, "distill/agreement": 3 / 4})
    # With bypass_mode the student's log-probs are those of its rollout.
    bypassing = batch.merge(batch.like(rollout_log_probs=old))
    assert torch.equal(distill_advantage(bypassing, bypassing, taught, task=task)["advantages"], result["advantages"])
    broken = batch.like(teacher_log_probs=torch.tensor([[0.0] * 3, [-math.inf, 0.0, 0.0]]))
    with pytest.raises(DataError, match="the teacher's log-prob of sample 1 of group 0 is -inf"):
        distill_advantage(batch, batch.like(old_log_probs=old), broken, task=task)
