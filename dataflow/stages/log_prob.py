"""Log-probs of the sampled tokens: under the weights the update starts from, and under the frozen reference."""

from __future__ import annotations

from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import Trainer
from dataflow.graph import Latest, Stage, stage
from dataflow.stages.correction import correction_stage
from dataflow.stages.scoring.kl_penalty import kl_penalty


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


def log_prob_stages(algorithm: Any, *, trainer: Any, on: str = "gpu") -> list[Stage]:
    """Returns the stages of log-probs that an algorithm needs: of the actor, of the reference, and the KL of the two.

    With those of the actor comes the correction of the rollout. With ``bypass_mode`` the rollout's own log-probs are
    the actor's, and no stage computes them again.

    Args:
        algorithm: the options of section ``algorithm``.
        trainer: the hosted trainer.
        on: resource of the trainer.
    """
    stages = []
    if not algorithm.bypass_mode:
        stages += [old_log_prob.bind(on=on, trainer=trainer), correction_stage(algorithm)]
    if algorithm.reference:
        stages.append(ref_log_prob.bind(on=on, trainer=trainer))
    if algorithm.use_kl_in_reward:
        penalty = kl_penalty.bind(algorithm=algorithm)
        stages.append(bypassing(penalty) if algorithm.bypass_mode else penalty)
    return stages


def bypassing(reader: Stage) -> Stage:
    """Returns a stage that takes the responses, with the rollout's own log-probs, where it took the old log-probs."""
    return reader.bind(renamed={"old_log_probs": "responses"})
