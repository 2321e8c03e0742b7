"""Rollout correction: verl's importance weights and rejections, from log-probs of the rollout and of the trainer.

Computed once for all samples of a step, as soon as the old log-probs are known, so that neither parts nor mini-batches
change it. With ``algorithm.bypass_mode`` there are no old log-probs; verl's loss then corrects each micro-batch.
"""

from __future__ import annotations

from typing import Any

from dataflow.batch import Batch
from dataflow.graph import TaskInfo


def correct(responses: Batch, log_probs: Batch, algorithm: Any, task: TaskInfo) -> Batch:
    """Returns ``log_probs`` with what the correction adds, and logs verl's ``rollout_corr/*``, corrected or not.

    Args:
        responses: columns of a rollout, with ``rollout_log_probs`` float32 ``[rows, R]``.
        log_probs: the same rows, with ``old_log_probs`` float32 ``[rows, R]``.
        algorithm: the options of section ``algorithm``: rollout_is, rollout_rs and what belongs to them.
        task: takes the metrics, of all samples of the step.

    Returns:
        The columns of ``log_probs``; with ``rollout_is`` also ``rollout_is_weights``, float32 ``[rows, R]``, unless
        the samples are not stale and ``rollout_is_stale_only`` is set; with ``rollout_rs`` also ``response_mask``,
        int64 ``[rows, R]``, 0 for rejected tokens.
    """
    mask = responses["response_mask"]
    if "rollout_log_probs" not in responses or not mask.any():
        return log_probs
    stale = task.step - 1 > responses.meta.get("weights_version", -1)
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=log_probs.only("old_log_probs")["old_log_probs"],  # the columns stay packed
        rollout_log_prob=responses["rollout_log_probs"],
        response_mask=mask,
        rollout_is=algorithm.rollout_is if stale or not algorithm.rollout_is_stale_only else None,
        rollout_is_threshold=algorithm.rollout_is_threshold,
        rollout_is_batch_normalize=algorithm.rollout_is_batch_normalize,
        rollout_rs=algorithm.rollout_rs,
        rollout_rs_threshold=algorithm.rollout_rs_threshold,
    )
    task.log(metrics)
    columns = log_probs.unread
    if weights is not None:
        columns["rollout_is_weights"] = weights.batch["rollout_is_weights"]
    if algorithm.rollout_rs is not None:
        columns["response_mask"] = kept.to(mask.dtype)
    return log_probs.like(**columns)
