"""Log-probs of the sampled tokens: under the weights the update starts from, and under the frozen reference."""

from __future__ import annotations

from dataflow.batch import Batch
from dataflow.engines.base import Trainer
from dataflow.graph import Latest, stage


@stage(writes="old_log_probs", on="gpu")
def old_log_prob(responses: Batch, actor: Latest, *, trainer: Trainer) -> Batch:
    """Returns ``old_log_probs`` float32 ``[rows, R]``: the proximal policy of the clipped loss.

    ``actor`` is read from the previous step, whatever the staleness: the update of this step starts from these weights.
    """
    return trainer.old_log_probs(responses)


@stage(writes="ref_log_probs", on="gpu")
def ref_log_prob(responses: Batch, *, trainer: Trainer) -> Batch:
    """Returns ``ref_log_prob`` float32 ``[rows, R]`` of the initial weights, for the KL term."""
    return trainer.ref_log_probs(responses)
