"""Updates of actor and critic: one optimizer step on one mini-batch. Each sample is trained exactly once per step.

The value of the fields ``actor`` and ``critic`` is the record of the groups that the step has trained on so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import Critic, Trainer
from dataflow.errors import RunError, counted
from dataflow.graph import Latest, Stage, TaskInfo, stage
from dataflow.stages.log_prob import bypassing


@dataclass(frozen=True)
class TrainedGroups:
    """The step whose updates made a model's weights, and the groups of this step trained on so far."""

    step: int = 0
    groups: frozenset[int] = frozenset()
    again: tuple[frozenset[int], ...] = ()
    """The groups that were trained on in the second epoch, the third and so on."""

    def then(self, task: TaskInfo, batch: Batch, groups: int) -> TrainedGroups:
        """Returns the record after one more mini-batch of a step with ``groups`` groups.

        Raises:
            RunError: a group comes twice in an epoch, out of turn, or is missing at the end of the step.
        """
        passes = [self.groups, *self.again] if self.step == task.step else [frozenset[int]()]
        passes += [frozenset()] * (task.epochs - len(passes))
        if twice := [group for group in batch.ids if group in passes[task.epoch]]:
            often = "twice in this step" if task.epochs == 1 else f"twice in epoch {task.epoch + 1} of this step"
            raise RunError(f"{task.stage}[{task.step}]: group {twice[0]} would be trained {often}.")
        if task.epoch and (new := [group for group in batch.ids if group not in passes[task.epoch - 1]]):
            raise RunError(
                f"{task.stage}[{task.step}]: group {new[0]} is in epoch {task.epoch + 1}, but not in the one before."
            )
        passes[task.epoch] = passes[task.epoch].union(batch.ids)
        if task.last and (short := [done for done in passes if len(done) != groups]):
            raise RunError(
                f"{task.stage}[{task.step}]: {len(short[0])} of {groups} groups were trained; none may be lost."
            )
        return TrainedGroups(task.step, passes[0], tuple(passes[1:]))


# Checkpoints of earlier versions hold records under this name.
Trained = TrainedGroups


def staleness(task: TaskInfo, batch: Batch) -> int:
    """Returns the samples' staleness: steps from the weights that sampled them to those that the update starts from.

    Raises:
        RunError: it is more than the policy allows, or unknown.
    """
    version = batch.meta.get("weights_version")
    if version is None:
        raise RunError(f"{task.stage}[{task.step}]: the samples carry no weights_version; did rollout stamp them?")
    lag = task.step - 1 - int(version)
    if not 0 <= lag <= task.max_staleness:
        raise RunError(
            f"{task.stage}[{task.step}]: samples of weights version {version} are {counted(lag, 'step')} old, "
            f"the policy allows 0 to {task.max_staleness}."
        )
    return lag


def whitened(batch: Batch) -> Batch:
    """Returns ``advantages`` with mean 0 and variance 1 over the batch's tokens, by verl; 0 where the mask is.

    Fewer than two tokens stay as they are.
    """
    from verl.utils.torch_functional import masked_whiten

    mask = batch["response_mask"].float()
    advantages = batch["advantages"]
    if mask.sum() > 1:
        advantages = masked_whiten(advantages, mask) * mask
    return batch.like(advantages=advantages)


def _counted(found: dict[str, float], name: str, task: TaskInfo, *columns: Batch) -> dict[str, float]:
    """Returns the metrics of an update, with the number of the step's skipped ones if samples may be dropped."""
    if not any("response_mask" in more for more in columns):
        return found
    # A step's metric is the mean over its updates; multiplied by their number, the sum.
    return {**found, f"{name}/skipped_updates": task.parts * found.get(f"{name}/skipped_updates", 0.0)}


@stage(writes="actor", on="gpu", role="trains", per_mini_batch=True)
def actor_update(
    responses: Batch,
    old_log_probs: Batch,
    advantages: Batch,
    actor: Latest,
    ref_log_probs: Batch | None = None,
    correction: Batch | None = None,
    *,
    trainer: Trainer,
    groups: int,
    warmup: int = 0,
    whiten: bool = False,
    task: TaskInfo,
) -> TrainedGroups:
    """Takes one optimizer step on the mini-batch's whole groups; returns the step's record of trained groups.

    Args:
        responses: columns of a rollout.
        old_log_probs: their log-probs under the weights that the step started from.
        advantages: their advantages; a ``response_mask`` in them replaces that of the responses.
        actor: the record so far; None for the initial weights.
        ref_log_probs: log-probs under the initial weights, for the KL term; None without one.
        correction: of the rollout, whose weights and ``response_mask`` the loss takes; None without one.
        trainer: holds the weights.
        groups: prompt groups in a step.
        warmup: steps at the beginning in which the weights stay, so that a critic learns first.
        whiten: whether to whiten the advantages over the mini-batch before.
        task: takes the trainer's metrics, ``staleness/*`` and, if samples may be dropped, ``actor/skipped_updates``
            of the step.

    Raises:
        RunError: a group is trained twice in a step or not at all, or its samples are too stale.
    """
    more = [field for field in (ref_log_probs, correction) if field is not None]
    columns = (old_log_probs, *more, advantages)
    batch = responses.merge(*columns)
    if whiten:
        batch = batch.merge(whitened(batch))
    lag = staleness(task, batch)
    record: Any = actor
    trained = (record or TrainedGroups()).then(task, batch, groups)
    task.log({"staleness/mean": float(lag), "staleness/max": float(lag)})
    if task.step > warmup:
        task.log(_counted(trainer.update(batch, last=task.last), "actor", task, *columns))
    return trained


def update_stage(algorithm: Any) -> Stage:
    """Returns the stage ``actor_update``; with ``bypass_mode`` it takes the rollout's log-probs for the old ones.

    Args:
        algorithm: the options of section ``algorithm``.
    """
    return bypassing(actor_update) if algorithm.bypass_mode else actor_update


@stage(writes="critic", on="gpu", role="trains", per_mini_batch=True)
def critic_update(
    responses: Batch,
    values: Batch,
    advantages: Batch,
    critic: Latest,
    *,
    value_model: Critic,
    groups: int,
    task: TaskInfo,
) -> TrainedGroups:
    """Takes one optimizer step of the critic on the mini-batch's whole groups; returns the step's record of groups.

    Args:
        responses: columns of a rollout.
        values: what the critic expected before the step's updates.
        advantages: with ``returns``; a ``response_mask`` in them replaces that of the responses.
        critic: the record so far; None for the initial weights.
        value_model: holds the weights.
        groups: prompt groups in a step.
        task: takes the critic's metrics, and ``critic/skipped_updates`` of the step if samples may be dropped.

    Raises:
        RunError: a group is trained twice in a step or not at all.
    """
    batch = responses.merge(values, advantages)
    record: Any = critic
    trained = (record or TrainedGroups()).then(task, batch, groups)
    task.log(_counted(value_model.update(batch, last=task.last), "critic", task, advantages))
    return trained
