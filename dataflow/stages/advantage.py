"""Advantages: verl's estimators over whole groups, from one score per response.

A sample whose reward failed and was not kept is left out of its group's baseline and gets a ``response_mask`` of zeros,
so that it trains nothing. The number of rows and groups stays the same.

Difference from verl: a group of equal scores gets advantages of exactly 0 here. In verl, the rounding errors of
float32 are divided by a standard deviation as small as they are: up to 0.9 for eight scores of 100.1.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from dataflow.batch import Batch
from dataflow.errors import ConfigError, PipelineError, nearest
from dataflow.graph import TaskInfo, stage

if TYPE_CHECKING:
    import torch

# Which scores each of verl's estimators uses, from verl's core_algos (0.9.1).
GROUPWISE = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
WHOLE_BATCH = {
    "gdpo": "whitens the advantages over the whole batch",
    "gpg": "scales by the share of non-zero scores in the whole batch",
    "reinforce_plus_plus": "whitens the returns over the whole batch",
    "reinforce_plus_plus_baseline": "whitens the advantages over the whole batch",
}
# These take each score relative to its group's: subtracting a constant from all scores of a group has no effect.
RELATIVE = (*GROUPWISE, "gdpo", "reinforce_plus_plus_baseline")
# These compare a sample with all others of the batch, so that a group may have a single sample.
WITHOUT_BASELINE = ("reinforce_plus_plus",)
UNFED = {
    "gae": "the values of a critic",
    "remax": "the reward of a greedy response as a baseline",
    "optimal_token_baseline": "the sum of squared probabilities at every token",
    "tir_optimal_token_baseline": "the sum of squared probabilities at every token",
}


def check_estimator(name: str) -> None:
    """Checks that an advantage estimator exists and that its inputs do. Imports nothing heavy.

    Raises:
        ConfigError: verl has no estimator of this name.
        PipelineError: it needs a column that no stage writes.

    >>> check_estimator("grpo")
    >>> check_estimator("grop")
    Traceback (most recent call last):
    dataflow.errors.ConfigError: algorithm.adv_estimator: no estimator 'grop'; did you mean 'grpo'?
    """
    if name in UNFED:
        raise PipelineError(
            f"algorithm.adv_estimator: '{name}' needs {UNFED[name]}, which no stage writes; "
            f"use one of {', '.join([*GROUPWISE, *WHOLE_BATCH])}."
        )
    known = [*GROUPWISE, *WHOLE_BATCH]
    if name not in known:
        guess = nearest(name, known) or f"; use one of {', '.join(known)}."
        raise ConfigError(f"algorithm.adv_estimator: no estimator '{name}'{guess}")


def needs_whole_batch(services: Mapping[str, Any]) -> str | None:
    """Returns why the bound estimator needs all groups of a step at once, or None if it does not."""
    algorithm = services.get("algorithm")
    name = getattr(algorithm, "adv_estimator", None)
    return f"adv_estimator '{name}' {WHOLE_BATCH[name]}" if name in WHOLE_BATCH else None


@stage(
    writes="advantages",
    on="controller",
    splittable=True,
    whole_batch=needs_whole_batch,
    imports=("verl.trainer.config", "verl.trainer.ppo.core_algos", "verl.trainer.ppo.metric_utils"),
)
def advantage(responses: Batch, rewards: Batch, *, algorithm: Any, task: TaskInfo) -> Batch:
    """Turns scores into ``advantages`` and ``returns``, float32 ``[rows, R]``, 0 after the end of each response.

    Args:
        responses: columns of a rollout.
        rewards: ``score`` of each response, the same groups in the same order. ``kept`` (bool ``[rows]``, optional)
            marks the samples that count: the others get zero advantage and mask, and so does the rest of a group
            with fewer than two samples left for a baseline.
        algorithm: the options of section ``algorithm``: adv_estimator, norm_adv_by_std_in_grpo.
        task: takes verl's metrics of scores, advantages and lengths over the samples that count; with ``kept`` also
            ``reward/dropped_samples`` and ``reward/dropped_groups``, the step's samples and groups that train nothing.

    Returns:
        ``advantages`` and ``returns``; the advantages of a group of two or more equal scores are exactly 0 (before the
        whitening of the estimators that whiten; REINFORCE++ compares the whole batch). With ``kept`` also
        ``response_mask``, int64 ``[rows, R]``, 0 for the samples that do not count.

    Raises:
        ConfigError: the estimator is unknown.
        PipelineError: the estimator needs more than scores.
        DataflowError: responses and rewards have different groups.
    """
    check_estimator(algorithm.adv_estimator)
    data = responses.merge(rewards)
    if "kept" not in rewards:
        return responses.like(**_estimate(data, algorithm, task))
    counts = _counting(rewards, algorithm.adv_estimator)
    _log_dropped(rewards.groups, counts, task)
    mask = responses["response_mask"] * counts[:, None]
    if counts.all():
        columns = _estimate(data, algorithm, task)
    elif counts.any():
        few = _estimate(data.rows(np.flatnonzero(counts.numpy())), algorithm, task)
        columns = {name: _spread(values, counts) for name, values in few.items()}
    else:
        columns = dict.fromkeys(("advantages", "returns"), mask.float())
    return responses.like(**columns, response_mask=mask)


def _counting(rewards: Batch, estimator: str) -> torch.Tensor:
    """Returns which samples count, bool ``[rows]``: those that were kept, if their group has a baseline left."""
    import torch

    kept: torch.Tensor = rewards["kept"]
    if estimator in WITHOUT_BASELINE:
        return kept
    _, group, size = np.unique(rewards.groups, return_inverse=True, return_counts=True)
    left = np.bincount(group, weights=kept.numpy())
    # verl uses the raw score of a single sample as its advantage. That is right only for groups of one from the start.
    whole = (left >= 2) | (left == size)
    return kept & torch.from_numpy(whole[group])


def _log_dropped(groups: np.ndarray, counts: torch.Tensor, task: TaskInfo) -> None:
    trained = len(np.unique(groups[counts.numpy()]))
    dropped = {"samples": int((~counts).sum()), "groups": len(np.unique(groups)) - trained}
    # A step's metric is the mean over its parts; multiplied by their number, it is the sum.
    task.log({f"reward/dropped_{what}": float(n * task.parts) for what, n in dropped.items()})


def _spread(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns the values in the rows that count, 0 in the others."""
    whole = values.new_zeros((len(counts), *values.shape[1:]))
    whole[counts] = values
    return whole


def _of_equal_scores(scores: torch.Tensor, groups: np.ndarray, estimator: str) -> torch.Tensor:
    """Returns which samples have the same score as all samples they are compared with, bool ``[rows]``.

    False for the single sample of a group of one, which is compared with none.
    """
    import torch

    where = np.zeros_like(groups) if estimator in WITHOUT_BASELINE else groups
    _, group, size = np.unique(where, return_inverse=True, return_counts=True)
    values = scores.float().numpy()
    lowest, highest = np.full(len(size), np.inf, np.float32), np.full(len(size), -np.inf, np.float32)
    np.minimum.at(lowest, group, values)
    np.maximum.at(highest, group, values)
    return torch.from_numpy(((lowest == highest) & (size > 1))[group])


def _estimate(samples: Batch, algorithm: Any, task: TaskInfo) -> dict[str, torch.Tensor]:
    """Returns verl's ``advantages`` and ``returns`` of the samples, and logs verl's metrics of them."""
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    data = samples.to_dataproto()
    mask = data.batch["response_mask"]
    scores = torch.zeros(mask.shape, dtype=torch.float32)
    # The score goes to the last token that the model sampled; tokens of tools' answers may lie between its turns.
    last = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(dim=-1)
    scores[torch.arange(len(mask)), last] = data.batch["score"].float()
    name = algorithm.adv_estimator
    estimate = get_adv_estimator_fn(name)
    by_std = {"norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo}
    # Some of verl's estimators take this option as an argument, some from the configuration.
    takes = inspect.signature(estimate).parameters
    equal = _of_equal_scores(data.batch["score"], samples.groups, name)
    advantages, returns = estimate(
        # Zeros minus their mean are exactly 0; other equal numbers minus their mean may differ in the last digit.
        token_level_rewards=scores.masked_fill(equal[:, None], 0.0) if name in RELATIVE else scores,
        response_mask=mask,
        index=data.non_tensor_batch["uid"],
        config=AlgoConfig(adv_estimator=name, **by_std),
        **(by_std if "norm_adv_by_std_in_grpo" in takes else {}),
    )
    if name not in RELATIVE:
        advantages = advantages.masked_fill(equal[:, None], 0.0)
        returns = advantages if name == "gpg" else returns
    found = {"advantages": advantages, "returns": returns}
    for column, values in {"token_level_scores": scores, "token_level_rewards": scores, **found}.items():
        data.batch[column] = values
    task.log(compute_data_metrics(data, use_critic=False))
    return found
