"""The losses that actor and critic are trained with: verl's PPO losses with a run's options, and their metrics."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.algorithms import BYPASS
from dataflow.metrics import Mean, by_name

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

PREFIX = "dataflow/"
"""Prefix of the names of the losses registered here."""
_OF_UPDATES = ("lr", "grad_norm", "kl_coef")
"""Metrics of an update as a whole, as are those of its machine."""
_OF_LOSS = ("loss", "pg_loss", "vf_loss", "kl_loss", "entropy_loss", "entropy")


def loss_of(options: Any, algorithm: Any, response_length: int) -> Any:
    """Returns verl's PPO loss with the options of sections ``trainer`` and ``algorithm``.

    The longest response, in tokens, is the default of ``loss_scale_factor``.
    """
    from verl.workers.utils.losses import ppo_loss

    return functools.partial(over_tokens, ppo_loss, config=actor_config(options, algorithm, response_length))


def actor_config(options: Any, algorithm: Any, response_length: int) -> Any:
    """Returns the options of :func:`loss_of` as verl's ``FSDPActorConfig``."""
    from verl.trainer.config import RolloutCorrectionConfig
    from verl.workers.config import FSDPActorConfig
    from verl.workers.config.actor import PolicyLossConfig

    register()
    mode = BYPASS if algorithm.bypass_mode else algorithm.policy_loss
    return _named(
        FSDPActorConfig,
        algorithm,
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=options.micro_batch_size,
        policy_loss=_named(
            PolicyLossConfig,
            algorithm,
            loss_mode=f"{PREFIX}{mode}" if mode in _OWN else mode,
            rollout_correction=_named(RolloutCorrectionConfig, algorithm, loss_type=algorithm.bypass_loss),
        ),
        loss_scale_factor=algorithm.loss_scale_factor or response_length,
    )


def _named(kind: Any, algorithm: Any, **others: Any) -> Any:
    """Returns a configuration of verl's with all options of ``algorithm`` that it has by the same name, and others."""
    names = {field.name for field in dataclasses.fields(kind)} & set(type(algorithm).model_fields)
    return kind(**{name: getattr(algorithm, name) for name in names} | others)


def value_loss_of(options: Any) -> Any:
    """Returns verl's loss of a critic with these options: ``cliprange_value``, ``loss_agg_mode``."""
    from verl.workers.config import FSDPCriticConfig
    from verl.workers.utils.losses import value_loss

    config = FSDPCriticConfig(
        strategy="fsdp2",
        ppo_micro_batch_size_per_gpu=options.micro_batch_size,
        cliprange_value=options.cliprange_value,
        loss_agg_mode=options.loss_agg_mode,
    )
    return functools.partial(over_tokens, value_loss, config=config)


def over_tokens(
    loss: Callable[..., tuple[Any, dict[str, Any]]], *, data: TensorDict, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """Calls a loss of verl's, and makes its metrics means over the tokens of a mini-batch.

    verl sums the losses of micro-batches and ranks, each divided by what the whole mini-batch counts, and takes the
    mean of the means over each one's tokens for all else, such as ``pg_clipfrac``.
    """
    from verl.utils.metric import AggregationType, Metric

    mask = data["response_mask"]
    tokens = float((mask.values() if mask.is_nested else mask).sum())
    share = tokens * data["dp_size"] / max(1.0, float(data["batch_num_tokens"]))
    found, metrics = loss(data=data, **more)
    for name, value in metrics.items():
        if name in _OF_UPDATES or (isinstance(value, Metric) and value.aggregation is not AggregationType.MEAN):
            continue
        number, reduces = value.aggregate() if isinstance(value, Metric) else value, by_name(name)
        metrics[name] = Metric("sum", number * share) if reduces is None else Metric(reduces.__name__, number)
    return found, metrics


def reduced(found: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Returns one float per metric, under verl's names, from the values of each rank and micro-batch.

    ``found`` is what verl's worker returned, with :func:`over_tokens`; names without a prefix get this one.
    """
    from verl.utils.metric import Metric

    metrics: dict[str, float] = {}
    on_gpu = bool(np.max(found.get("perf/max_memory_allocated_gb", 0.0)))
    for name, value in found.items():
        if name.startswith("perf/") and not on_gpu:
            continue  # memory statistics of the device, zero on a CPU
        if isinstance(value, list) and isinstance(value[0], Metric):
            value = Metric.aggregate_dp(value)
        number = float((by_name(name) or np.mean)(np.ravel(value)))
        if name != "mfu":
            metrics[name if "/" in name else f"{prefix}/{name}"] = number
        elif number > 0:  # verl gives 0 for a model or a GPU that it does not know
            metrics[f"perf/mfu/{prefix}"] = number
    return metrics


def weighed(
    metrics: Mapping[str, float], rows: int, tokens: int, seconds: float, loss_agg_mode: str
) -> dict[str, float]:
    """Returns the metrics of an update with what each counts, so that the mean over a step's updates is over that."""
    of_loss = tokens if loss_agg_mode == "token-mean" else rows
    found = dict(metrics)
    for name, value in metrics.items():
        group, _, last = name.partition("/")
        if group in ("actor", "critic", "rollout_corr") and last not in _OF_UPDATES and by_name(name) is None:
            found[name] = Mean(value, of_loss if last in _OF_LOSS else tokens)
        elif name.startswith("perf/mfu/"):
            found[name] = Mean(value, seconds)
    return found


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
