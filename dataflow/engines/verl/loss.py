"""The losses that actor and critic are trained with: verl's PPO losses, with a run's options."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from dataflow.algorithms.losses import BYPASS
from dataflow.engines.verl.measures import over_tokens
from dataflow.errors import ConfigError

if TYPE_CHECKING:
    import torch

PREFIX = "dataflow/"
"""Prefix of the names of the losses registered here."""


def loss_of(options: Any, algorithm: Any, response_length: int) -> Any:
    """Returns verl's PPO loss with these options.

    Args:
        options: section ``trainer``.
        algorithm: section ``algorithm``.
        response_length: longest response, in tokens; the default of ``loss_scale_factor``.

    Raises:
        ConfigError: an option that verl refuses.
    """
    from verl.workers.utils.losses import ppo_loss

    return functools.partial(over_tokens, ppo_loss, config=actor_config(options, algorithm, response_length))


def actor_config(options: Any, algorithm: Any, response_length: int) -> Any:
    """Returns the options of :func:`loss_of` as verl's ``FSDPActorConfig``.

    Raises:
        ConfigError: an option that verl refuses.
    """
    from verl.workers.config import FSDPActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    register()
    mode = BYPASS if algorithm.bypass_mode else algorithm.policy_loss
    try:
        return FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=options.micro_batch_size,
            clip_ratio=algorithm.clip_ratio,
            clip_ratio_low=algorithm.clip_ratio_low,
            clip_ratio_high=algorithm.clip_ratio_high,
            clip_ratio_c=algorithm.clip_ratio_c,
            tau_pos=algorithm.tau_pos,
            tau_neg=algorithm.tau_neg,
            policy_loss=PolicyLossConfig(
                loss_mode=f"{PREFIX}{mode}" if mode in _OWN else mode,
                clip_cov_ratio=algorithm.clip_cov_ratio,
                clip_cov_lb=algorithm.clip_cov_lb,
                clip_cov_ub=algorithm.clip_cov_ub,
                kl_cov_ratio=algorithm.kl_cov_ratio,
                ppo_kl_coef=algorithm.ppo_kl_coef,
                dro_beta=algorithm.dro_beta,
                rollout_correction=_correction(algorithm),
            ),
            loss_agg_mode=algorithm.loss_agg_mode,
            loss_scale_factor=algorithm.loss_scale_factor or response_length,
            entropy_coeff=algorithm.entropy_coeff,
            use_kl_loss=algorithm.use_kl_loss,
            kl_loss_coef=algorithm.kl_loss_coef,
            kl_loss_type=algorithm.kl_loss_type,
        )
    except ValueError as error:
        raise ConfigError(f"algorithm: verl refuses it: {error}") from error


def value_loss_of(options: Any) -> Any:
    """Returns verl's loss of a critic with these options: ``cliprange_value``, ``loss_agg_mode``.

    Raises:
        ConfigError: an option that verl refuses.
    """
    from verl.workers.config import FSDPCriticConfig
    from verl.workers.utils.losses import value_loss

    try:
        config = FSDPCriticConfig(
            strategy="fsdp2",
            ppo_micro_batch_size_per_gpu=options.micro_batch_size,
            cliprange_value=options.cliprange_value,
            loss_agg_mode=options.loss_agg_mode,
        )
    except ValueError as error:
        raise ConfigError(f"critic: verl refuses it: {error}") from error
    return functools.partial(over_tokens, value_loss, config=config)


def _correction(algorithm: Any) -> Any:
    """Returns the options of the loss with ``bypass_mode``; other losses read none of them."""
    from verl.trainer.config import RolloutCorrectionConfig

    return RolloutCorrectionConfig(
        rollout_is=algorithm.rollout_is,
        rollout_is_threshold=algorithm.rollout_is_threshold,
        rollout_is_batch_normalize=algorithm.rollout_is_batch_normalize,
        rollout_rs=algorithm.rollout_rs,
        rollout_rs_threshold=algorithm.rollout_rs_threshold,
        bypass_mode=algorithm.bypass_mode,
        loss_type=algorithm.bypass_loss,
    )


def _geo_mean(**tensors: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``geo_mean``, as a mean over the mini-batch.

    verl's own is a mean over the micro-batch, so that the gradient would grow with the number of micro-batches.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    loss, metrics = get_policy_loss_fn("geo_mean")(**tensors)
    whole = tensors["config"].global_batch_info
    if whole.get("global_batch_size") is None:
        return loss, metrics
    # Rows that only pad a micro-batch contribute 0 to the mean, but count in it.
    rows = tensors["response_mask"].shape[0]
    return loss * rows * whole["dp_size"] / whole["global_batch_size"], metrics


def _bypass_mode(**tensors: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``bypass_mode``, which also takes a micro-batch of rows that only pad it."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    if tensors["response_mask"].any():
        return get_policy_loss_fn(BYPASS)(**tensors)  # type: ignore[no-any-return]
    return (tensors["log_prob"] * tensors["response_mask"]).sum(), {}


_OWN = {"geo_mean": _geo_mean, BYPASS: _bypass_mode}


def register() -> None:
    """Adds the losses of this module to verl's registry. Idempotent."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    for name, loss in _OWN.items():
        register_policy_loss(f"{PREFIX}{name}")(loss)
