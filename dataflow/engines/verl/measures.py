"""Metrics of an optimizer step: verl's, one number each for all ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import NonTensorData, TensorDict


def count_flops(rows: TensorDict, lengths: np.ndarray) -> None:
    """Lets verl's FlopsCounter compute the MFU of a step from the tokens of each sequence.

    Args:
        rows: of this rank, for verl's engine.
        lengths: tokens of the rows of all ranks.
    """
    from verl.utils import tensordict_utils as tu

    tu.assign_non_tensor(rows, global_token_num=NonTensorData(lengths.tolist()))


def reduced(found: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Returns one float per metric, under verl's names, from the values of each rank and micro-batch.

    Args:
        found: what verl's worker returned.
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
        metrics[name if "/" in name else f"{prefix}/{name}"] = float(np.mean(value))
    return metrics
