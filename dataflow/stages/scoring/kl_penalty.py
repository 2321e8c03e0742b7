"""KL in the reward: a penalty on each token for its distance from the initial weights, with one coefficient a step.

The penalty of a step is computed once, from all of its samples, and needs no rewards, so that it is ready while they
are awaited. An adaptive coefficient is updated once a step, after its use; parts and mini-batches do not change it. It
is a state of the graph, which checkpoints keep.
"""

from __future__ import annotations

from typing import Any

from dataflow.batch import Batch
from dataflow.graph import Latest, TaskInfo, stage


@stage(
    writes=("kl_penalty", "kl_coef"),
    on="controller",
    imports=("verl.trainer.ppo.core_algos", "verl.trainer.config"),
)
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

    data = responses.merge(old_log_probs, ref_log_probs)
    mask = responses["response_mask"]  # before a correction rejects tokens, as in verl
    old = data["rollout_log_probs" if algorithm.bypass_mode else "old_log_probs"]
    distance = core_algos.kl_penalty(old, data["ref_log_prob"], kl_penalty=algorithm.kl_penalty) * mask
    control = core_algos.get_kl_controller(KLControlConfig(**algorithm.kl_ctrl.model_dump()))
    if isinstance(kl_coef, float):
        control.value = kl_coef
    used = float(control.value)
    kl = masked_mean(distance, mask=mask, axis=-1).mean().item()
    control.update(current_kl=kl, n_steps=len(responses))
    task.log({"actor/reward_kl_penalty": kl, "actor/reward_kl_penalty_coeff": used})
    return responses.like(kl_penalty=used * distance), float(control.value)
