"""The stages of a critic: values before the updates, and its own update."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.errors import RunError
from dataflow.graph import Read, TaskInfo
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.critic import critic_update, values
from dataflow.stages.update import TrainedGroups, whitened


class Toy:
    """A critic whose values are all 1."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], list[Any], bool]] = []

    def values(self, batch: Batch) -> Batch:
        return batch.like(values=torch.ones(len(batch), 3))

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        self.calls.append((batch.ids, batch["response_mask"].tolist(), last))
        assert {"values", "returns"} <= set(batch.names)
        return {"critic/vf_loss": 0.5} if batch["response_mask"].any() else {"critic/skipped_updates": 1.0}


def samples(*groups: int) -> Batch:
    return Batch(list(groups), {"response_mask": torch.ones(len(groups), 3, dtype=torch.long)}, {"weights_version": 0})


def gains(batch: Batch, **columns: torch.Tensor) -> Batch:
    zeros = torch.zeros(len(batch), 3)
    return batch.like(advantages=zeros, returns=zeros, **columns)


def test_values_are_those_of_the_critic_of_the_step_before() -> None:
    assert values.reads == (Read("responses"), Read("critic", "latest"))
    assert Read("critic", "latest") in critic_update.reads
    found = values(samples(2, 0), None, value_model=Toy())
    assert found.ids == (2, 0)
    assert found["values"].tolist() == [[1.0] * 3] * 2


def test_the_critic_trains_each_group_once() -> None:
    toy, critic = Toy(), None
    for part, groups in enumerate([(2, 0), (1, 3)]):
        task, batch = TaskInfo(4, "critic_update", part, 2), samples(*groups)
        critic = critic_update(batch, toy.values(batch), gains(batch), critic, value_model=toy, groups=4, task=task)
        assert task.metrics == {"critic/vf_loss": 0.5, "critic/skipped_updates": 0.0}
    assert critic == TrainedGroups(4, frozenset(range(4)))
    assert [(ids, last) for ids, _, last in toy.calls] == [((2, 0), False), ((1, 3), True)]
    batch = samples(1)
    with pytest.raises(RunError, match=r"critic_update\[4\]: group 1 would be trained twice"):
        critic_update(batch, toy.values(batch), gains(batch), critic, value_model=toy, groups=4, task=task)
    with pytest.raises(RunError, match=r"critic_update\[5\]: 1 of 4 groups were trained; none may be lost"):
        critic_update(
            batch, toy.values(batch), gains(batch), critic, value_model=toy, groups=4, task=TaskInfo(5, "critic_update")
        )


def test_dropped_samples_train_no_critic() -> None:
    toy, batch = Toy(), samples(0, 1)
    for mask, told in ([[1, 1, 0], [0, 0, 0]], 0.0), ([[0, 0, 0], [0, 0, 0]], 1.0):
        toy.calls.clear()
        task = TaskInfo(1, "critic_update", 0, 3)
        dropped = gains(batch, response_mask=torch.tensor(mask))
        critic_update(batch, toy.values(batch), dropped, None, value_model=toy, groups=6, task=task)
        assert toy.calls == [((0, 1), mask, False)]
        assert task.metrics["critic/skipped_updates"] == told


@pytest.mark.heavy
@pytest.mark.parametrize("tokens", [0, 1])
def test_what_cannot_be_whitened_stays(tokens: int) -> None:
    mask = torch.zeros(2, 3, dtype=torch.long)
    mask[0, :tokens] = 1
    batch = Batch([0, 1], {"advantages": torch.full((2, 3), 4.0), "response_mask": mask})
    assert torch.equal(whitened(batch)["advantages"], batch["advantages"])


@pytest.mark.heavy
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_mini_batches_are_whitened_alike_however_a_step_is_split(parts: int) -> None:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    draw = torch.Generator().manual_seed(1)
    rows, groups = 32, [row // 4 for row in range(32)]
    mask = (torch.arange(5) < torch.randint(1, 6, (rows, 1), generator=draw)).long()
    columns = {
        "prompts": torch.full((rows, 3), 7),
        "responses": mask * 8,
        "attention_mask": torch.cat([torch.ones(rows, 3, dtype=torch.long), mask], dim=1),
        "response_mask": mask,
    }
    responses = Batch(groups, columns)
    scores = torch.randint(0, 2, (rows,), generator=draw).float()
    old = torch.randn(rows, 5, generator=draw) * mask
    algorithm = AlgorithmConfig(preset="ppo", whiten="mini-batch")
    stage = advantage_stage(algorithm)
    assert stage.whole_batch is not None
    assert stage.whole_batch(stage.services) is None

    def trained(part: Batch) -> list[torch.Tensor]:
        """The advantages of each of the mini-batches that a part consists of."""
        rewards, values_ = part.like(score=part["score"]), part.like(values=part["values"])
        plain = part.like(**{name: part[name] for name in columns})
        found = stage.fn(plain, rewards, values_, algorithm=algorithm, task=TaskInfo(1))
        ids = list(dict.fromkeys(part.ids))
        pairs = [ids[at : at + 2] for at in range(0, len(ids), 2)]  # four mini-batches of two groups
        return [whitened(plain.merge(found).select(pair))["advantages"] for pair in pairs]

    whole = responses.merge(responses.like(score=scores, values=old))
    ids = list(dict.fromkeys(whole.ids))
    each = len(ids) // parts
    split = [whole.select(ids[at : at + each]) for at in range(0, len(ids), each)]
    assert all(map(torch.equal, [a for part in split for a in trained(part)], trained(whole)))
    # One mini-batch of the whole step is verl's own whitening.
    rewards = torch.zeros(rows, 5).scatter(1, mask.sum(dim=1, keepdim=True) - 1, scores[:, None])
    verls, returns = compute_gae_advantage_return(rewards, old, mask.float(), gamma=1.0, lam=0.95)
    found = stage.fn(responses, responses.like(score=scores), responses.like(values=old), algorithm=algorithm,
                     task=TaskInfo(1))  # fmt: skip
    assert torch.equal(found["returns"], returns * mask)
    torch.testing.assert_close(whitened(responses.merge(found))["advantages"], verls * mask, atol=1e-5, rtol=1e-5)
