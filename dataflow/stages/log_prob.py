"""Log-probs of the sampled tokens, and what follows from them before any reward is there.

    responses -> old_log_prob (the weights that the update starts from) -> rollout_correction -> correction
              -> ref_log_prob (the frozen initial weights) ---------------> kl_penalty -> kl_penalty, kl_coef

Each is computed once for all samples of a step, so that neither parts nor mini-batches change it. With
``algorithm.bypass_mode`` there are no old log-probs; verl's loss then corrects each micro-batch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import Trainer
from dataflow.graph import Latest, Stage, TaskInfo, stage


@stage(writes="old_log_probs", on="gpu")
def old_log_prob(responses: Batch, actor: Latest, *, trainer: Trainer) -> Batch:
    """Returns ``old_log_probs`` float32 ``[rows, R]``: the proximal policy of the clipped loss.

    Args:
        responses: columns of a rollout.
        actor: read from the previous step, whatever the staleness: the update starts from these weights.
        trainer: holds the weights.
    """
    return trainer.old_log_probs(responses)


@stage(writes="ref_log_probs", on="gpu")
def ref_log_prob(responses: Batch, *, trainer: Trainer) -> Batch:
    """Returns ``ref_log_prob`` float32 ``[rows, R]`` of the initial weights, for the KL term."""
    return trainer.ref_log_probs(responses)


@stage(writes="correction", on="controller")
def rollout_correction(responses: Batch, old_log_probs: Batch, *, algorithm: Any, task: TaskInfo) -> Batch:
    """Returns verl's importance weights and rejections, and logs its ``rollout_corr/*``, corrected or not.

    Args:
        responses: columns of a rollout, with ``rollout_log_probs`` float32 ``[rows, R]``.
        old_log_probs: the same rows, with ``old_log_probs`` float32 ``[rows, R]``.
        algorithm: the options of section ``algorithm``: rollout_is, rollout_rs and what belongs to them.
        task: takes the metrics, of all samples of the step.

    Returns:
        With ``rollout_is`` ``rollout_is_weights``, float32 ``[rows, R]``; with ``rollout_rs`` ``response_mask``, int64
        ``[rows, R]``, 0 for rejected tokens. No columns without these, or if the rollout has no log-probs.
    """
    if "rollout_log_probs" not in responses or not responses.nonzero("response_mask").any():
        return responses.like()
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    mask = responses["response_mask"]
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=old_log_probs["old_log_probs"],
        rollout_log_prob=responses["rollout_log_probs"],
        response_mask=mask,
        rollout_is=algorithm.rollout_is,
        rollout_is_threshold=algorithm.rollout_is_threshold,
        rollout_is_batch_normalize=algorithm.rollout_is_batch_normalize,
        rollout_rs=algorithm.rollout_rs,
        rollout_rs_threshold=algorithm.rollout_rs_threshold,
    )
    task.log(metrics)
    columns = {} if weights is None else {"rollout_is_weights": weights.batch["rollout_is_weights"]}
    if algorithm.rollout_rs is not None:
        columns["response_mask"] = kept.to(mask.dtype)
    return responses.like(**columns)


@stage(writes=("kl_penalty", "kl_coef"), on="controller")
def kl_penalty(
    responses: Batch,
    old_log_probs: Batch,
    ref_log_probs: Batch,
    kl_coef: float | Latest | None,
    *,
    algorithm: Any,
    task: TaskInfo,
) -> tuple[Batch, float]:
    """Returns the penalty, float32 ``[rows, R]``, to be subtracted from the rewards, and the next step's coefficient.

    An adaptive coefficient is updated once a step, after its use. It is a state of the graph, which checkpoints keep.

    Args:
        responses: columns of a rollout.
        old_log_probs: their log-probs under the weights that the update starts from; with ``bypass_mode`` those of
            the rollout are in the responses.
        ref_log_probs: their log-probs under the initial weights.
        kl_coef: this step's coefficient; None for the first one.
        algorithm: the options of section ``algorithm``: kl_penalty, kl_ctrl and bypass_mode.
        task: takes verl's ``actor/reward_kl_penalty``, the KL per token averaged over responses, and
            ``actor/reward_kl_penalty_coeff``.
    """
    from verl.trainer.config import KLControlConfig
    from verl.trainer.ppo import core_algos
    from verl.utils.torch_functional import masked_mean

    mask = responses["response_mask"]  # before a correction rejects tokens, as in verl
    old = responses["rollout_log_probs"] if algorithm.bypass_mode else old_log_probs["old_log_probs"]
    distance = core_algos.kl_penalty(old, ref_log_probs["ref_log_prob"], kl_penalty=algorithm.kl_penalty) * mask
    control = core_algos.get_kl_controller(KLControlConfig(**algorithm.kl_ctrl.model_dump()))
    if isinstance(kl_coef, float):
        control.value = kl_coef
    used = float(control.value)
    kl = masked_mean(distance, mask=mask, axis=-1).mean().item()
    control.update(current_kl=kl, n_steps=len(responses))
    task.log({"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": used})
    return responses.like(kl_penalty=used * distance), float(control.value)


def log_prob_stages(algorithm: Any, *, trainer: Any, on: str = "gpu") -> list[Stage]:
    """Returns the stages of this file that an algorithm needs.

    A correction that corrects nothing only logs: no stage waits for it, and it keeps none from the controller.

    Args:
        algorithm: the options of section ``algorithm``.
        trainer: the hosted trainer.
        on: resource of the trainer.
    """
    stages = []
    if not algorithm.bypass_mode:
        correction = rollout_correction.bind(algorithm=algorithm)
        stages.append(old_log_prob.bind(on=on, trainer=trainer))
        stages.append(correction if algorithm.corrects else replace(correction, writes=(), on="io"))
    if algorithm.reference:
        stages.append(ref_log_prob.bind(on=on, trainer=trainer))
    if algorithm.use_kl_in_reward:
        penalty = kl_penalty.bind(algorithm=algorithm)
        stages.append(bypassing(penalty) if algorithm.bypass_mode else penalty)
    return stages


def bypassing(reader: Stage) -> Stage:
    """Returns a stage that takes the responses, with the rollout's own log-probs, where it took the old log-probs."""
    return reader.bind(renamed={"old_log_probs": "responses"})
