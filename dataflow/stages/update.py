"""Actor update: one optimizer step on one mini-batch, which sees to it that each sample trains once per step."""

from __future__ import annotations

from dataflow.batch import Batch
from dataflow.engines.base import Trainer
from dataflow.errors import RunError
from dataflow.graph import Latest, Stage, TaskInfo, stage


class TrainedOnce:
    """Remembers which groups a step has trained on, so that none is trained twice or left out."""

    def __init__(self) -> None:
        self.step = 0
        self.trained: set[int] = set()

    def check(self, task: TaskInfo, batch: Batch, groups: int) -> None:
        """Takes one mini-batch of a step.

        Raises:
            RunError: a group comes twice in a step, is missing at its end, or its samples are too stale.
        """
        if task.step != self.step:
            self.step, self.trained = task.step, set()
        for group in batch.ids:
            if group in self.trained:
                raise RunError(f"actor_update[{task.step}]: group {group} would be trained twice in this step.")
            self.trained.add(group)
        if task.last and len(self.trained) != groups:
            raise RunError(
                f"actor_update[{task.step}]: {len(self.trained)} of {groups} groups were trained; none may be lost."
            )


def staleness(task: TaskInfo, batch: Batch) -> int:
    """Returns how many steps older the samples' weights are than those this step's update starts from.

    Raises:
        RunError: more than the policy allows.
    """
    version = batch.meta.get("weights_version")
    if version is None:
        raise RunError(f"actor_update[{task.step}]: the samples carry no weights_version; did rollout stamp them?")
    lag = task.step - 1 - int(version)
    if not 0 <= lag <= task.max_staleness:
        raise RunError(
            f"actor_update[{task.step}]: samples of weights version {version} are {lag} steps old, "
            f"the policy allows 0 to {task.max_staleness}."
        )
    return lag


def _update(trainer: Trainer, groups: int, task: TaskInfo, batch: Batch) -> int:
    lag = staleness(task, batch)
    once: TrainedOnce | None = getattr(trainer, "trained_once", None)
    if once is None:
        once = TrainedOnce()
        trainer.trained_once = once  # type: ignore[attr-defined]
    once.check(task, batch, groups)
    task.log(trainer.update(batch, last=task.last))
    task.log({"staleness/mean": float(lag), "staleness/max": float(lag)})
    return task.step


@stage(writes="actor", on="gpu", per_mini_batch=True)
def actor_update(
    responses: Batch,
    old_log_probs: Batch,
    advantages: Batch,
    actor: Latest,
    *,
    trainer: Trainer,
    groups: int,
    task: TaskInfo,
) -> int:
    """Takes one optimizer step on the mini-batch's whole groups; returns the step whose weights these are."""
    return _update(trainer, groups, task, responses.merge(old_log_probs, advantages))


@stage(writes="actor", on="gpu", per_mini_batch=True)
def actor_update_kl(
    responses: Batch,
    old_log_probs: Batch,
    ref_log_probs: Batch,
    advantages: Batch,
    actor: Latest,
    *,
    trainer: Trainer,
    groups: int,
    task: TaskInfo,
) -> int:
    """Like :func:`actor_update`, with the reference's log-probs for the KL term."""
    return _update(trainer, groups, task, responses.merge(old_log_probs, ref_log_probs, advantages))


def update_stage(use_reference: bool) -> Stage:
    """Returns the update that reads the reference's log-probs, or the one that does without."""
    return actor_update_kl.bind(name="actor_update") if use_reference else actor_update
