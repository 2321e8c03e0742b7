"""The update checks that every sample is trained once per step, and that its weights are recent enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.errors import RunError
from dataflow.graph import TaskInfo
from dataflow.metrics import of_step
from dataflow.stages.critic import critic_update
from dataflow.stages.update import TrainedGroups, actor_update, staleness, update_stage


def samples(*groups: int, version: int | None = 0, **columns) -> Batch:
    rows = [g for g in groups for _ in range(2)]
    meta = {} if version is None else {"weights_version": version}
    return Batch(rows, {"score": [0.0] * len(rows), **{n: [v] * len(rows) for n, v in columns.items()}}, meta)


def info(step: int = 1, part: int = 0, parts: int = 2, max_staleness: int = 0) -> TaskInfo:
    return TaskInfo(step=step, stage="actor_update", part=part, parts=parts, max_staleness=max_staleness)


def test_each_epoch_trains_each_group_once():
    trained = TrainedGroups()
    for part, (epoch, groups) in enumerate([(0, (0, 3)), (1, (0, 3)), (0, (1, 2)), (1, (1, 2))]):
        task = replace(info(1, part, parts=4), epoch=epoch, epochs=2)
        trained = trained.then(task, samples(*groups), 4)
        with pytest.raises(RunError, match=f"would be trained twice in epoch {epoch + 1} of this step"):
            trained.then(task, samples(*groups), 4)
    assert trained == TrainedGroups(1, frozenset(range(4)), (frozenset(range(4)),))
    assert trained.then(replace(info(2, 0, parts=4), epochs=2), samples(0), 4) == TrainedGroups(
        2, frozenset({0}), (frozenset(),)
    )


def test_epochs_that_differ_in_groups_are_refused():
    trained = TrainedGroups(1, frozenset({0, 1}), (frozenset({0}),))
    with pytest.raises(RunError, match=r"group 2 is in epoch 2, but not in the one before"):
        trained.then(replace(info(1, 3, parts=4), epoch=1, epochs=2), samples(2), 2)
    with pytest.raises(RunError, match=r"1 of 3 groups were trained"):
        trained.then(replace(info(1, 3, parts=4), epoch=0, epochs=2), samples(2), 3)


def test_a_group_that_comes_twice_is_refused():
    trained = TrainedGroups().then(info(1, 0), samples(0, 3), 4)
    with pytest.raises(RunError, match=r"actor_update\[1\]: group 3 would be trained twice in this step"):
        trained.then(info(1, 1), samples(1, 3), 4)


def test_a_group_that_is_missing_at_the_end_is_an_error():
    trained = TrainedGroups().then(info(1, 0), samples(0, 3), 4)
    with pytest.raises(RunError, match=r"actor_update\[1\]: 3 of 4 groups were trained; none may be lost"):
        trained.then(info(1, 1), samples(1), 4)


@pytest.mark.parametrize(
    ("step", "version", "allowed", "lag"), [(1, 0, 0, 0), (5, 4, 0, 0), (5, 3, 1, 1), (6, 1, 4, 4)]
)
def test_staleness_is_counted_from_the_weights_that_the_update_starts_from(step, version, allowed, lag):
    assert staleness(info(step, max_staleness=allowed), samples(0, version=version)) == lag


@pytest.mark.parametrize(("step", "version", "allowed"), [(5, 3, 0), (5, 2, 1), (9, 3, 4)])
def test_samples_that_are_too_stale_are_refused(step, version, allowed):
    with pytest.raises(RunError, match=f"{step - 1 - version} steps? old, the policy allows 0 to {allowed}"):
        staleness(info(step, max_staleness=allowed), samples(0, version=version))


def test_samples_without_a_version_are_refused():
    with pytest.raises(RunError, match="carry no weights_version; did rollout stamp them"):
        staleness(info(), samples(0, version=None))


class Trainer:
    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[str, ...], bool]] = []
        self.masks: list[list[int]] = []

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        self.calls.append((batch.ids, tuple(sorted(batch.names)), last))
        if "response_mask" in batch:
            self.masks.append(batch["response_mask"].tolist())
            if not batch["response_mask"].any():
                return {"actor/skipped_updates": 1.0}
        return {"actor/pg_loss": 0.5}


def test_an_update_trains_on_all_columns_and_logs():
    trainer = Trainer()
    stage = actor_update.bind(trainer=trainer, groups=4)
    actor = TrainedGroups(2, frozenset(range(4)))
    for part, groups in enumerate([(2, 0), (1, 3)]):
        task = info(3, part, max_staleness=1)
        batch = samples(*groups, version=1)
        more = batch.like(old_log_probs=[0.0] * 4), batch.like(advantages=[0.0] * 4)
        actor = stage(batch, *more, actor, task=task, **stage.services)
        counts = {"staleness/mean": 1.0, "staleness/max": 1.0, "actor/skipped_updates": 0.0}
        assert task.metrics == {"actor/pg_loss": 0.5, **counts}
    assert actor == TrainedGroups(3, frozenset(range(4)))
    names = ("advantages", "old_log_probs", "score")
    assert trainer.calls == [((2, 0), names, False), ((1, 3), names, True)]


def test_dropped_samples_train_with_an_empty_mask_and_skipped_updates_add_up():
    trainer = Trainer()
    stage = actor_update.bind(trainer=trainer, groups=6)
    actor, told = None, []
    masks = [[1, 1, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0]]
    for part, mask in enumerate(masks):
        batch = samples(2 * part, 2 * part + 1, version=0)
        batch = batch.merge(batch.like(response_mask=torch.ones(4, dtype=torch.long)))
        task = info(1, part, parts=3)
        advantages = batch.like(response_mask=torch.tensor(mask))
        actor = stage(batch, batch, advantages, actor, task=task, **stage.services)
        told.append(task.metrics["actor/skipped_updates"])
    assert trainer.masks == masks
    assert [last for _, _, last in trainer.calls] == [False, False, True]
    assert actor.groups == frozenset(range(6))
    assert of_step("actor/skipped_updates", told) == 2


class Skips(Trainer):
    """Skips the updates of a script, as verl does those whose gradient is not finite."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.script = list(script)

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        super().update(batch, last=last)
        return {f"{name}/skipped_updates": 1.0 for name in ("actor", "critic")} if self.script.pop(0) == "x" else {}


@pytest.mark.parametrize("name", ["actor", "critic"])
def test_updates_that_are_skipped_in_a_row_end_the_run(name: str) -> None:
    trainer = Skips("xx.xxx")
    hosted = {"trainer": trainer} if name == "actor" else {"value_model": trainer}
    stage = (actor_update if name == "actor" else critic_update).bind(**hosted, groups=2, max_skipped=3)
    record, batch = None, samples(0, 1)
    for step in (1, 2, 3, 4, 5):
        task = TaskInfo(stage=stage.name, step=step, max_staleness=9)
        record = stage(batch, batch, batch, record, task=task, **stage.services)
    assert record == TrainedGroups(5, frozenset({0, 1}), skipped=2), "a checkpoint keeps the count"
    task = TaskInfo(stage=stage.name, step=6, max_staleness=9)
    message = (
        rf"^{name}_update\[6\]: the last 3 updates were all skipped \(trainer.max_skipped=3\), so that the {name} "
        "learns nothing: their gradients are not finite; lower"
    )
    with pytest.raises(RunError, match=message):
        stage(batch, batch, batch, record, task=task, **stage.services)


def test_updates_without_a_sample_are_skipped_ones_for_another_reason() -> None:
    stage = actor_update.bind(trainer=Trainer(), groups=2, max_skipped=1)
    batch = samples(0, 1)
    none = batch.like(response_mask=torch.zeros(4, 1, dtype=torch.long))
    with pytest.raises(RunError, match=r"the last 1 update were all skipped .*no sample is left to train on; see rew"):
        stage(batch, batch, none, None, task=info(parts=1), **stage.services)


def test_while_the_critic_learns_first_the_actor_stays_and_its_groups_still_count():
    trainer = Trainer()
    stage = actor_update.bind(trainer=trainer, groups=2, warmup=2)
    actor = None
    for step in (1, 2, 3):
        task, batch = info(step, parts=1, max_staleness=2), samples(0, 1, version=0)
        actor = stage(batch, batch, batch, actor, task=task, **stage.services)
        assert actor == TrainedGroups(step, frozenset({0, 1}))
        assert ("actor/pg_loss" in task.metrics) == (step == 3)
        assert task.metrics["staleness/max"] == step - 1
    assert len(trainer.calls) == 1


@pytest.mark.slow
def test_advantages_are_whitened_before_the_update():
    class Seen(Trainer):
        def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
            assert batch["advantages"].mean().item() == pytest.approx(0, abs=1e-6)
            assert batch["advantages"].std().item() == pytest.approx(1, abs=1e-4)
            return super().update(batch, last=last)

    batch = samples(0, 1)
    batch = batch.merge(batch.like(response_mask=torch.ones(4, 2, dtype=torch.long)))
    advantages = batch.like(advantages=torch.arange(8.0).reshape(4, 2))
    stage = actor_update.bind(trainer=Seen(), groups=2, whiten=True)
    stage(batch, batch, advantages, None, task=info(parts=1), **stage.services)
    assert torch.equal(advantages["advantages"], torch.arange(8.0).reshape(4, 2)), "the critic's update sees them, too"


def test_with_bypass_mode_the_update_reads_the_responses_in_place_of_the_old_log_probs():
    assert update_stage(AlgorithmConfig()) is actor_update
    update = update_stage(AlgorithmConfig(bypass_mode=True))
    assert [read.field for read in update.reads][:3] == ["responses", "responses", "advantages"]
