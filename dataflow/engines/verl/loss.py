"""The losses that actor and critic are trained with: verl's PPO losses, with a run's options."""

from __future__ import annotations

import functools
from typing import Any

from dataflow.errors import ConfigError


def loss_of(options: Any, algorithm: Any, response_length: int) -> Any:
    """Returns verl's PPO loss with these options.

    Raises:
        ConfigError: an option that verl refuses.
    """
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    try:
        config = FSDPActorConfig(
            strategy="fsdp2",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=options.micro_batch_size,
            clip_ratio=algorithm.clip_ratio,
            clip_ratio_low=algorithm.clip_ratio_low,
            clip_ratio_high=algorithm.clip_ratio_high,
            loss_agg_mode=algorithm.loss_agg_mode,
            loss_scale_factor=response_length,
            entropy_coeff=algorithm.entropy_coeff,
            use_kl_loss=algorithm.use_kl_loss,
            kl_loss_coef=algorithm.kl_loss_coef,
            kl_loss_type=algorithm.kl_loss_type,
        )
    except ValueError as error:
        raise ConfigError(f"algorithm: verl refuses it: {error}") from error
    return functools.partial(ppo_loss, config=config)


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
    return functools.partial(value_loss, config=config)
