"""Advantages: verl's estimators over whole groups, from one score per response."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from dataflow.batch import Batch
from dataflow.errors import ConfigError, PipelineError, nearest
from dataflow.graph import TaskInfo, stage

# What each of verl's estimators looks at beyond a group's own scores, read in verl's core_algos (0.9.1).
GROUPWISE = ("grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo")
WHOLE_BATCH = {
    "gdpo": "whitens the advantages over the whole batch",
    "gpg": "scales by the share of non-zero scores in the whole batch",
    "reinforce_plus_plus": "whitens the returns over the whole batch",
    "reinforce_plus_plus_baseline": "whitens the advantages over the whole batch",
}
UNFED = {
    "gae": "the values of a critic",
    "remax": "the reward of a greedy response as a baseline",
    "optimal_token_baseline": "the sum of squared probabilities at every token",
    "tir_optimal_token_baseline": "the sum of squared probabilities at every token",
}


def check_estimator(name: str) -> None:
    """Sees to it that an advantage estimator exists and can be fed. Imports nothing heavy.

    Raises:
        ConfigError: no estimator of verl's has this name.
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


def needs_whole_batch(tools: Mapping[str, Any]) -> str | None:
    """Returns why the estimator that is bound needs all groups of a step at once, or None if it does not."""
    algorithm = tools.get("algorithm")
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
    """Turns scores into ``advantages`` and ``returns``, float32 ``[rows, R]``, 0 behind the responses' ends.

    Args:
        responses: columns of a rollout.
        rewards: ``score`` of each response, the same groups in the same order.
        algorithm: the options of section ``algorithm``: adv_estimator, norm_adv_by_std_in_grpo.
        task: takes verl's metrics of scores, advantages and lengths.

    Raises:
        ConfigError: an unknown estimator.
        PipelineError: an estimator that needs more than scores.
        DataflowError: responses and rewards are not of the same groups.
    """
    import torch

    name = algorithm.adv_estimator
    check_estimator(name)
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    data = responses.merge(rewards).to_dataproto()
    mask = data.batch["response_mask"]
    scores = torch.zeros(mask.shape, dtype=torch.float32)
    # A response's one score stands on its last token.
    scores[torch.arange(len(mask)), (mask.sum(dim=-1) - 1).clamp(min=0)] = data.batch["score"].float()
    estimate = get_adv_estimator_fn(name)
    by_std = {"norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo}
    # Some of verl's estimators take this option as an argument, some from the configuration.
    takes = inspect.signature(estimate).parameters
    advantages, returns = estimate(
        token_level_rewards=scores,
        response_mask=mask,
        index=data.non_tensor_batch["uid"],
        config=AlgoConfig(adv_estimator=name, **by_std),
        **(by_std if "norm_adv_by_std_in_grpo" in takes else {}),
    )
    for column, values in {
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "advantages": advantages,
        "returns": returns,
    }.items():
        data.batch[column] = values
    task.log(compute_data_metrics(data, use_critic=False))
    return responses.like(advantages=advantages, returns=returns)
