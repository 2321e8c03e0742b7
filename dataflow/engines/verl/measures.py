"""Metrics of an optimizer step: verl's, one number each for all ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tensordict import NonTensorData, TensorDict

from dataflow.metrics import Mean, by_name


def count_flops(rows: TensorDict, lengths: np.ndarray) -> None:
    """Lets verl's FlopsCounter compute the MFU of a step from the tokens of each sequence.

    Args:
        rows: of this rank, for verl's engine.
        lengths: tokens of the rows of all ranks.
    """
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(rows, global_token_num=NonTensorData(lengths.tolist()))


_OF_UPDATES = ("lr", "grad_norm", "kl_coef")
"""Metrics of an update as a whole, as are those of its machine."""
_OF_LOSS = ("loss", "pg_loss", "vf_loss", "kl_loss", "entropy_loss", "entropy")


def reduced(found: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Returns one float per metric, under verl's names, from the values of each rank and micro-batch.

    Args:
        found: what verl's worker returned, with :func:`over_tokens`.
        prefix: of names without one, such as ``actor``.
    """
    from verl.utils.metric import Metric

    metrics: dict[str, float] = {}
    on_gpu = bool(np.max(found.get("perf/max_memory_allocated_gb", 0.0)))
    for name, value in found.items():
        if name.startswith("perf/") and not on_gpu:
            continue  # memory statistics of the device, zero on a CPU
        if name == "mfu":
            # verl gives 0 for a model or a GPU that it does not know.
            if (share := float(np.mean(value))) > 0:
                metrics[f"perf/mfu/{prefix}"] = share
            continue
        if isinstance(value, list) and isinstance(value[0], Metric):
            value = Metric.aggregate_dp(value)
        metrics[name if "/" in name else f"{prefix}/{name}"] = float((by_name(name) or np.mean)(np.ravel(value)))
    return metrics


def weighed(
    metrics: Mapping[str, float], rows: int, tokens: int, seconds: float, loss_agg_mode: str
) -> dict[str, float]:
    """Returns the metrics of an update with what each counts, so that the mean over a step's updates is over that.

    Args:
        metrics: of the update.
        rows, tokens: that were trained on.
        seconds: that the update took.
        loss_agg_mode: of the loss: over tokens, or over sequences.
    """
    of_loss = tokens if loss_agg_mode == "token-mean" else rows
    found = dict(metrics)
    for name, value in metrics.items():
        group, _, last = name.partition("/")
        if group in ("actor", "critic", "rollout_corr") and last not in _OF_UPDATES and by_name(name) is None:
            found[name] = Mean(value, of_loss if last in _OF_LOSS else tokens)
        elif name.startswith("perf/mfu/"):
            found[name] = Mean(value, seconds)
    return found


def over_tokens(
    loss: Callable[..., tuple[Any, dict[str, Any]]], *, data: TensorDict, **more: Any
) -> tuple[Any, dict[str, Any]]:
    """Calls a loss of verl's, and makes its metrics means over the tokens of a mini-batch.

    verl sums the losses of micro-batches and ranks, each divided by what the whole mini-batch counts, and takes the
    mean of the means over each one's tokens for all else, such as ``pg_clipfrac``.

    Args:
        loss: verl's ``ppo_loss`` or ``value_loss``.
        data: of the micro-batch.
        more: other arguments of the loss.
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
