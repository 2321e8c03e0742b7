"""Rollout correction: verl's importance weights and rejections, from log-probs of the rollout and of the trainer.

Computed once for all samples of a step, as soon as the old log-probs are known, so that neither parts nor mini-batches
change it; off the trainer, which computes meanwhile. With ``algorithm.bypass_mode`` there are no old log-probs; verl's
loss then corrects each micro-batch.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from dataflow.batch import Batch
from dataflow.graph import Stage, TaskInfo, stage


@stage(writes="correction", on="controller", imports=("verl.trainer.ppo.rollout_corr_helper",))
async def rollout_correction(responses: Batch, old_log_probs: Batch, *, algorithm: Any, task: TaskInfo) -> Batch:
    """Corrects the samples of a step in a thread, as other stages share the event loop; see :func:`correct`."""
    return await asyncio.to_thread(correct, responses, old_log_probs, algorithm, task)


def correct(responses: Batch, old_log_probs: Batch, algorithm: Any, task: TaskInfo) -> Batch:
    """Returns what the correction adds to the old log-probs, and logs verl's ``rollout_corr/*``, corrected or not.

    Args:
        responses: columns of a rollout, with ``rollout_log_probs`` float32 ``[rows, R]``.
        old_log_probs: the same rows, with ``old_log_probs`` float32 ``[rows, R]``.
        algorithm: the options of section ``algorithm``: rollout_is, rollout_rs and what belongs to them.
        task: takes the metrics, of all samples of the step.

    Returns:
        With ``rollout_is`` ``rollout_is_weights``, float32 ``[rows, R]``, unless the samples are not stale and
        ``rollout_is_stale_only`` is set; with ``rollout_rs`` ``response_mask``, int64 ``[rows, R]``, 0 for rejected
        tokens. No columns without these, or if the rollout has no log-probs.
    """
    if "rollout_log_probs" not in responses or not responses.nonzero("response_mask").any():
        return responses.like()
    stale = task.step - 1 > responses.meta.get("weights_version", -1)
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    mask = responses["response_mask"]
    weights, kept, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=old_log_probs["old_log_probs"],
        rollout_log_prob=responses["rollout_log_probs"],
        response_mask=mask,
        rollout_is=algorithm.rollout_is if stale or not algorithm.rollout_is_stale_only else None,
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


def correction_stage(algorithm: Any) -> Stage:
    """Returns the stage ``rollout_correction``.

    If nothing is corrected, it only logs: no stage waits for it, and it keeps none from the controller.

    Args:
        algorithm: the options of section ``algorithm``, without ``bypass_mode``.
    """
    bound = rollout_correction.bind(algorithm=algorithm)
    return bound if algorithm.corrects else replace(bound, writes=(), on="io")
