"""Updates of actor and critic: every sample is trained on once a step, from weights that are recent enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.errors import RunError
from dataflow.graph import Read, TaskInfo
from dataflow.metrics import of_step
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.critic import critic_update, values
from dataflow.stages.log_prob import bypassing
from dataflow.stages.update import TrainedGroups, actor_update, staleness, whitened


def samples(*groups: int, version: int | None = 0) -> Batch:
    rows = [group for group in groups for _ in range(2)]
    return Batch(rows, {"score": [0.0] * len(rows)}, {} if version is None else {"weights_version": version})


def info(step: int = 1, part: int = 0, parts: int = 2, max_staleness: int = 0) -> TaskInfo:
    return TaskInfo(step=step, stage="actor_update", part=part, parts=parts, max_staleness=max_staleness)


def test_each_epoch_trains_each_group_once() -> None:
    trained = TrainedGroups()
    for part, (epoch, groups) in enumerate([(0, (0, 3)), (1, (0, 3)), (0, (1, 2)), (1, (1, 2))]):
        task = replace(info(1, part, parts=4), epoch=epoch, epochs=2)
        trained = trained.then(task, samples(*groups), 4)
        with pytest.raises(RunError, match=f"would be trained in epoch {epoch + 1} of this step after {epoch + 1}"):
            trained.then(task, samples(*groups), 4)
    assert trained == TrainedGroups(1, dict.fromkeys(range(4), 2))
    following = trained.then(replace(info(2, 0, parts=4), epochs=2), samples(0), 4)
    assert following == TrainedGroups(2, {0: 1})


def test_a_group_that_comes_twice_out_of_turn_or_not_at_all_is_refused() -> None:
    trained = TrainedGroups().then(info(1, 0), samples(0, 3), 4)
    with pytest.raises(RunError, match=r"\[1\]: group 3 would be trained in epoch 1 of this step after 1 time"):
        trained.then(info(1, 1), samples(1, 3), 4)
    with pytest.raises(RunError, match=r"actor_update\[1\]: 3 of 4 groups were trained; none may be lost"):
        trained.then(info(1, 1), samples(1), 4)
    epochs = TrainedGroups(1, {0: 2, 1: 1})
    with pytest.raises(RunError, match=r"group 2 would be trained in epoch 2 of this step after 0 times"):
        epochs.then(replace(info(1, 3, parts=4), epoch=1, epochs=2), samples(2), 2)
    with pytest.raises(RunError, match=r"1 of 3 groups were trained"):
        epochs.then(replace(info(1, 3, parts=4), epoch=0, epochs=2), samples(2), 3)


@pytest.mark.parametrize(("step", "version", "allowed"), [(1, 0, 0), (5, 4, 0), (5, 3, 1), (6, 1, 4)])
def test_staleness_is_counted_from_the_weights_that_the_update_starts_from(
    step: int, version: int, allowed: int
) -> None:
    assert staleness(info(step, max_staleness=allowed), samples(0, version=version)) == step - 1 - version
    with pytest.raises(RunError, match=f"{step - version} steps? old, the policy allows 0 to {allowed}"):
        staleness(info(step + 1, max_staleness=allowed), samples(0, version=version))
    with pytest.raises(RunError, match="carry no weights_version; did rollout stamp them"):
        staleness(info(), samples(0, version=None))


class Trainer:
    """An actor and a critic that record what they are given; updates marked ``x`` in a script are skipped."""

    def __init__(self, script: str = "") -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[str, ...], bool]] = []
        self.masks: list[list[int]] = []
        self.script = list(script)

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        self.calls.append((batch.ids, tuple(sorted(batch.names)), last))
        skipped = self.script.pop(0) == "x" if self.script else False
        if "response_mask" in batch:
            self.masks.append(batch["response_mask"].tolist())
            skipped = not batch["response_mask"].any()
        names = ("actor/skipped_updates", "critic/skipped_updates")
        return dict.fromkeys(names, 1.0) if skipped else {"loss": 0.5}

    def values(self, batch: Batch) -> Batch:
        return batch.like(values=torch.ones(len(batch), 3))


def test_an_update_trains_on_all_columns_and_logs() -> None:
    trainer, actor = Trainer(), TrainedGroups(2, dict.fromkeys(range(4), 1))
    for part, groups in enumerate([(2, 0), (1, 3)]):
        task, batch = info(3, part, max_staleness=1), samples(*groups, version=1)
        more = batch.like(old_log_probs=[0.0] * 4), batch.like(advantages=[0.0] * 4)
        actor = actor_update(batch, *more, actor, trainer=trainer, groups=4, task=task)
        counts = {"staleness/mean": 1.0, "staleness/max": 1.0, "actor/skipped_updates": 0.0}
        assert task.metrics == {"loss": 0.5, **counts}
    assert actor == TrainedGroups(3, dict.fromkeys(range(4), 1))
    names = ("advantages", "old_log_probs", "score")
    assert trainer.calls == [((2, 0), names, False), ((1, 3), names, True)]


def test_a_critic_trains_on_the_values_of_the_step_before() -> None:
    assert values.reads == (Read("responses"), Read("critic", "latest"))
    assert Read("critic", "latest") in critic_update.reads
    trainer, critic = Trainer(), None
    for part, groups in enumerate([(2, 0), (1, 3)]):
        task, batch = TaskInfo(4, "critic_update", part, 2), samples(*groups)
        guessed, gains = values(batch, None, value_model=trainer), batch.like(returns=torch.zeros(4, 3))
        critic = critic_update(batch, guessed, gains, critic, value_model=trainer, groups=4, task=task)
        assert task.metrics == {"loss": 0.5, "critic/skipped_updates": 0.0}
    assert critic == TrainedGroups(4, dict.fromkeys(range(4), 1))
    assert trainer.calls[0] == ((2, 0), ("returns", "score", "values"), False)


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_dropped_samples_train_with_an_empty_mask_and_skipped_updates_add_up(name: str) -> None:
    trainer, record, told = Trainer(), None, []
    hosted = {"trainer": trainer} if name == "actor" else {"value_model": trainer}
    update = actor_update if name == "actor" else critic_update
    masks = [[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    for part, mask in enumerate(masks):
        batch = samples(2 * part, 2 * part + 1)
        batch = batch.merge(batch.like(response_mask=torch.ones(4, dtype=torch.long)))
        task = TaskInfo(1, update.name, part, 3)
        dropped = batch.like(response_mask=torch.tensor(mask))
        record = update(batch, batch, dropped, record, **hosted, groups=6, task=task)
        told.append(task.metrics[f"{name}/skipped_updates"])
    assert trainer.masks == masks
    assert [last for _, _, last in trainer.calls] == [False, False, True]
    assert record.times == dict.fromkeys(range(6), 1)
    assert of_step(f"{name}/skipped_updates", told) == 2


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_updates_that_are_skipped_in_a_row_end_the_run(name: str) -> None:
    trainer = Trainer("xx.xxx")
    hosted: dict[str, Any] = {"trainer": trainer} if name == "actor" else {"value_model": trainer}
    update = actor_update if name == "actor" else critic_update
    record, batch = None, samples(0, 1)

    def updated(step: int) -> Any:
        task = TaskInfo(stage=update.name, step=step, max_staleness=9)
        return update(batch, batch, batch, record, **hosted, groups=2, max_skipped=3, task=task)

    for step in (1, 2, 3, 4, 5):
        record = updated(step)
    assert record == TrainedGroups(5, dict.fromkeys((0, 1), 1), skipped=2), "a checkpoint keeps the count"
    with pytest.raises(RunError, match=rf"\[6\]: the last 3 updates were all skipped .*the {name} learns .*not finite"):
        updated(6)
    none = batch.like(response_mask=torch.zeros(4, 1, dtype=torch.long))
    with pytest.raises(RunError, match=r"the last 1 update were all skipped .*no sample is left to train on; see rew"):
        actor_update(batch, batch, none, None, trainer=Trainer(), groups=2, max_skipped=1, task=info(parts=1))


def test_while_the_critic_learns_first_the_actor_stays_and_its_groups_still_count() -> None:
    trainer, actor = Trainer(), None
    for step in (1, 2, 3):
        task, batch = info(step, parts=1, max_staleness=2), samples(0, 1)
        actor = actor_update(batch, batch, batch, actor, trainer=trainer, groups=2, warmup=2, task=task)
        assert actor == TrainedGroups(step, dict.fromkeys((0, 1), 1))
        assert ("loss" in task.metrics) == (step == 3)
        assert task.metrics["staleness/max"] == step - 1


def test_with_bypass_mode_the_update_reads_the_responses_in_place_of_the_old_log_probs() -> None:
    assert [read.field for read in bypassing(actor_update).reads][:3] == ["responses", "responses", "advantages"]


@pytest.mark.heavy
def test_advantages_are_whitened_before_the_update() -> None:
    seen: list[torch.Tensor] = []

    class Seen(Trainer):
        def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
            seen.append(batch["advantages"])
            return super().update(batch, last=last)

    batch = samples(0, 1)
    batch = batch.merge(batch.like(response_mask=torch.ones(4, 2, dtype=torch.long)))
    advantages = batch.like(advantages=torch.arange(8.0).reshape(4, 2))
    actor_update(batch, batch, advantages, None, trainer=Seen(), groups=2, whiten=True, task=info(parts=1))
    assert (seen[0].mean().item(), seen[0].std().item()) == pytest.approx((0, 1), abs=1e-4)
    assert torch.equal(advantages["advantages"], torch.arange(8.0).reshape(4, 2)), "the critic's update sees them, too"
    for tokens in (0, 1):  # what cannot be whitened stays
        mask = torch.zeros(2, 3, dtype=torch.long)
        mask[0, :tokens] = 1
        few = Batch([0, 1], {"advantages": torch.full((2, 3), 4.0), "response_mask": mask})
        assert torch.equal(whitened(few)["advantages"], few["advantages"])


@pytest.mark.heavy
def test_mini_batches_are_whitened_alike_however_a_step_is_split() -> None:
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    draw = torch.Generator().manual_seed(1)
    rows, ids = 32, list(range(8))
    mask = (torch.arange(5) < torch.randint(1, 6, (rows, 1), generator=draw)).long()
    whole = torch.cat([torch.ones(rows, 3, dtype=torch.long), mask], dim=1)
    columns = {"prompts": whole[:, :3], "responses": mask * 8, "attention_mask": whole, "response_mask": mask}
    responses = Batch([row // 4 for row in range(rows)], columns)
    rewards = responses.like(score=torch.randint(0, 2, (rows,), generator=draw).float())
    old = responses.like(values=torch.randn(rows, 5, generator=draw) * mask)
    algorithm = AlgorithmConfig(preset="ppo", whiten="mini-batch")
    stage = advantage_stage(algorithm)

    def trained(groups: list[int]) -> list[torch.Tensor]:
        """The advantages of each of the mini-batches, of two groups, that a part consists of."""
        part = responses.select(groups)
        found = stage(part, rewards.select(groups), old.select(groups), algorithm=algorithm, task=TaskInfo(1))
        pairs = [groups[at : at + 2] for at in range(0, len(groups), 2)]
        return [whitened(part.merge(found).select(pair))["advantages"] for pair in pairs]

    for size in (2, 4):
        parts = [each for at in range(0, 8, size) for each in trained(ids[at : at + size])]
        assert all(map(torch.equal, parts, trained(ids)))
    # One mini-batch of the whole step is verl's own whitening.
    given = torch.zeros(rows, 5).scatter(1, mask.sum(dim=1, keepdim=True) - 1, rewards["score"][:, None])
    verls, returns = compute_gae_advantage_return(given, old["values"], mask.float(), gamma=1.0, lam=0.95)
    found = stage(responses, rewards, old, algorithm=algorithm, task=TaskInfo(1))
    assert torch.equal(found["returns"], returns * mask)
    torch.testing.assert_close(whitened(responses.merge(found))["advantages"], verls * mask, atol=1e-5, rtol=1e-5)
