"""Log-probs of the sampled tokens: under the weights the update starts from, and under the frozen reference."""

from __future__ import annotations

from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import Trainer
from dataflow.graph import Latest, TaskInfo, stage
from dataflow.stages.correction import correct


@stage(writes="old_log_probs", on="gpu")
def old_log_prob(responses: Batch, actor: Latest, *, trainer: Trainer, algorithm: Any = None, task: TaskInfo) -> Batch:
    """Returns ``old_log_probs`` float32 ``[rows, R]``: the proximal policy of the clipped loss.

    Args:
        responses: columns of a rollout.
        actor: read from the previous step, whatever the staleness: the update starts from these weights.
        trainer: holds the weights.
        algorithm: the options of section ``algorithm``, for the correction of the rollout
            (:func:`dataflow.stages.correction.correct`), which adds columns; None leaves it out.
        task: takes verl's ``rollout_corr/*``.
    """
    found = trainer.old_log_probs(responses)
    return found if algorithm is None else correct(responses, found, algorithm, task)


@stage(writes="ref_log_probs", on="gpu")
def ref_log_prob(responses: Batch, *, trainer: Trainer) -> Batch:
    """Returns ``ref_log_prob`` float32 ``[rows, R]`` of the initial weights, for the KL term."""
    return trainer.ref_log_probs(responses)
