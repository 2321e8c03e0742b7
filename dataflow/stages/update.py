"""The actor's update: one optimizer step on one mini-batch. Each sample is trained exactly once per step.

The value of the field ``actor``, and of ``critic``, is the record of the groups that the step has trained on so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import Trainer
from dataflow.errors import RunError, counted
from dataflow.graph import Latest, TaskInfo, stage
from dataflow.metrics import Sum


@dataclass(frozen=True)
class TrainedGroups:
    """The step whose updates made a model's weights, and how often each group of it was trained on so far."""

    step: int = 0
    times: Mapping[int, int] = field(default_factory=dict)
    skipped: int = 0
    """Updates up to the last one that were skipped in a row."""

    def then(self, task: TaskInfo, batch: Batch, groups: int) -> TrainedGroups:
        """Returns the record after one more mini-batch of a step with ``groups`` groups.

        Raises RunError if a group comes twice in an epoch, out of turn, or is missing at the end of the step.
        """
        times = dict(self.times) if self.step == task.step else {}
        for group in batch.ids:
            if times.get(group, 0) != task.epoch:
                raise RunError(
                    f"{task.stage}[{task.step}]: group {group} would be trained in epoch {task.epoch + 1} of this step "
                    f"after {counted(times.get(group, 0), 'time')}."
                )
            times[group] = task.epoch + 1
        whole = sum(number == task.epochs for number in times.values())
        if task.last and not whole == len(times) == groups:
            raise RunError(f"{task.stage}[{task.step}]: {whole} of {groups} groups were trained; none may be lost.")
        return TrainedGroups(task.step, times, self.skipped)

    def after(self, metrics: Mapping[str, float], batch: Batch, task: TaskInfo, name: str, most: int) -> TrainedGroups:
        """Logs the metrics of an update, with the number of the step's skipped ones; returns the record after it.

        Raises RunError if ``most`` updates were skipped in a row, but for the last.
        """
        missed = metrics.get(f"{name}/skipped_updates", 0.0)
        task.log({**metrics, f"{name}/skipped_updates": Sum(missed)})
        if (skipped := self.skipped + 1 if missed else 0) < most:
            return replace(self, skipped=skipped)
        why = "their gradients are not finite; lower the learning rate or the scores, or take other weights"
        if "response_mask" in batch and not batch.nonzero("response_mask").any():
            why = "no sample is left to train on; see reward/dropped_samples and rollout_corr/* in metrics.jsonl"
        raise RunError(
            f"{task.stage}[{task.step}]: the last {counted(skipped, 'update')} were all skipped "
            f"(trainer.max_skipped={most}), so that the {name} learns nothing: {why}."
        )


def staleness(task: TaskInfo, batch: Batch) -> int:
    """Returns the samples' staleness: steps from the weights that sampled them to those that the update starts from.

    Raises RunError if it is more than the policy allows, or unknown.
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
    max_skipped: int = 10,
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
        max_skipped: updates that may be skipped in a row before the run ends.
        task: takes the trainer's metrics, ``staleness/*`` and ``actor/skipped_updates`` of the step.

    Raises:
        RunError: a group is trained twice in a step or not at all, its samples are too stale, or too many updates were
            skipped.
    """
    more = [field for field in (ref_log_probs, correction) if field is not None]
    batch = responses.merge(old_log_probs, *more, advantages)
    if whiten:
        batch = batch.merge(whitened(batch))
    lag = staleness(task, batch)
    record: Any = actor
    trained = (record or TrainedGroups()).then(task, batch, groups)
    task.log({"staleness/mean": float(lag), "staleness/max": float(lag)})
    if task.step <= warmup:
        return trained
    return trained.after(trainer.update(batch, last=task.last), batch, task, "actor", max_skipped)
