"""On-policy distillation: the parts that the teacher forms, and advantages computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.errors import DataflowError
from dataflow.graph import TaskInfo
from dataflow.stages.distill import distill_advantage, teacher_log_prob


def responses(groups: int, n: int = 2, length: int = 3) -> Batch:
    rows = groups * n
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, 1:] = 0
    return Batch(np.repeat(np.arange(groups), n), {"response_mask": mask, "tokens": torch.arange(rows)})


class Teacher:
    def log_probs(self, batch: Batch) -> Batch:
        return batch.like(teacher_log_probs=-batch["tokens"].float()[:, None].expand(-1, 3))


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_teacher_scores_each_group_in_exactly_one_part(parts: int) -> None:
    whole, found = responses(4), []
    for part in range(parts):
        take = None if parts == 1 else 4 // parts
        scored = teacher_log_prob(whole, teacher=Teacher(), task=TaskInfo(1, part=part, parts=parts, take=take))
        assert scored["teacher_log_probs"][:, 0].tolist() == (-whole.select(scored.ids)["tokens"].float()).tolist()
        found += scored.ids
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("together", [1, 2])
def test_the_teacher_reads_the_same_rows_at_a_time_however_a_step_is_split(together: int) -> None:
    whole, asked = responses(4), []

    class Recording(Teacher):
        def log_probs(self, batch: Batch) -> Batch:
            asked[-1].append(batch.ids)
            return super().log_probs(batch)

    scored = []
    for parts in (1, 2):
        asked.append([])
        for part in range(parts):
            task = TaskInfo(1, part=part, parts=parts, take=None if parts == 1 else 2)
            scored.append(teacher_log_prob(whole, teacher=Recording(), together=together, task=task))
    assert asked[0] == asked[1] == [tuple(range(at, at + together)) for at in range(0, 4, together)]
    both = Batch.concat(scored[1:])
    assert both.groups.tolist() == scored[0].groups.tolist()
    assert torch.equal(both["teacher_log_probs"], scored[0]["teacher_log_probs"])


def test_an_advantage_is_how_much_likelier_the_teacher_finds_a_token() -> None:
    batch, task = responses(1), TaskInfo(step=1)
    old = batch.like(old_log_probs=torch.tensor([[-1.0, -5.0, -5.0], [-2.0, -1.0, -4.0]]))
    taught = batch.like(teacher_log_probs=torch.tensor([[-3.0, -1.0, -1.0], [-1.0, -1.0, -2.0]]))
    result = distill_advantage(batch, old, taught, task=task)
    assert result["advantages"].tolist() == [[-2.0, 0.0, 0.0], [1.0, 0.0, 2.0]], "0 after the end"
    assert torch.equal(result["returns"], result["advantages"])
    assert task.metrics == pytest.approx({"distill/reverse_kl": -1 / 4, "distill/agreement": 3 / 4})


def test_with_bypass_mode_the_student_is_scored_by_its_rollout() -> None:
    batch = responses(1)
    batch = batch.merge(batch.like(rollout_log_probs=torch.full((2, 3), -1.0)))
    taught = batch.like(teacher_log_probs=torch.full((2, 3), -0.5))
    result = distill_advantage(batch, batch, taught, task=TaskInfo(step=1))
    assert result["advantages"].tolist() == [[0.5, 0.0, 0.0], [0.5, 0.5, 0.5]]


def test_a_teacher_that_agrees_teaches_nothing() -> None:
    batch = responses(2)
    same = torch.randn(4, 3)
    result = distill_advantage(
        batch, batch.like(old_log_probs=same), batch.like(teacher_log_probs=same), task=TaskInfo(step=1)
    )
    assert not result["advantages"].any()


def test_other_groups_are_refused() -> None:
    batch = responses(2)
    values = torch.zeros(4, 3)
    scored = batch.like(teacher_log_probs=values)
    with pytest.raises(DataflowError, match="their groups differ"):
        distill_advantage(batch, batch.like(old_log_probs=values), scored.select([0]), task=TaskInfo(step=1))
