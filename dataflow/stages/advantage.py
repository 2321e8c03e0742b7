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

from dataflow.algorithms import ESTIMATORS, Estimator
from dataflow.batch import Batch
from dataflow.errors import DataError
from dataflow.graph import Read, Stage, TaskInfo
from dataflow.metrics import Mean, Sum, by_name
from dataflow.stages.rollout import CLIP_RATIO, cut_off, token_metrics
from dataflow.usercode.numeric import LARGEST_SCORE

if TYPE_CHECKING:
    import torch

PRELOAD = ("verl.trainer.ppo.core_algos", "verl.trainer.ppo.metric_utils")
"""What :func:`advantage` imports, for 5 s of CPU; its process imports it before the first rewards are there."""

_READ = {
    "values": "the critic's value",
    "reward_baselines": "the score of the greedy response",
    "old_log_probs": "the log-prob",
    "sum_pi_squared": "the sum of squared probabilities",
    "rollout_is_weights": "the weight of the rollout correction",
    "kl_penalty": "the KL penalty",
}
"""Columns that verl's estimators take, each some of them, and what they are."""


def needs_whole_batch(services: Mapping[str, Any]) -> str | None:
    """Returns why the bound estimator needs all groups of a step at once, or None if it does not."""
    algorithm = services.get("algorithm")
    name = getattr(algorithm, "adv_estimator", None)
    found = ESTIMATORS.get(str(name))
    if found is None or not found.whole_batch or _whitens_later(algorithm):
        return None
    return f"adv_estimator '{name}' {found.whole_batch}"


def _whitens_later(algorithm: Any) -> bool:
    """Whether the update whitens the advantages, over its mini-batch."""
    return algorithm.adv_estimator == "gae" and getattr(algorithm, "whiten", "step") == "mini-batch"


def advantage_stage(algorithm: Any) -> Stage:
    """Returns the stage ``advantage``, which reads the fields that the algorithm needs besides responses and rewards.

    ``values`` are a critic's, float32 ``[rows, R]`` (gae). ``reward_baselines`` are the scores of greedy responses, one
    a group (remax). ``old_log_probs`` hold ``sum_pi_squared`` (the optimal token baselines). A ``correction`` has their
    weights, and the ``response_mask`` if it rejects tokens. ``kl_penalty`` is subtracted from the reward of each token.

    Args:
        algorithm: the options of section ``algorithm``.
    """
    fields = ["responses", "rewards", *ESTIMATORS[algorithm.adv_estimator].needs]
    if algorithm.corrects and (algorithm.rollout_rs is not None or "old_log_probs" in fields):
        fields.append("correction")
    if algorithm.use_kl_in_reward:
        fields.append("kl_penalty")
    return Stage(
        name="advantage",
        fn=advantage,
        reads=tuple(map(Read, fields)),
        writes=("advantages",),
        on="controller",
        per="part",
        services={"algorithm": algorithm},
        accepts=("algorithm",),
        whole_batch=needs_whole_batch,
    )


def advantage(responses: Batch, rewards: Batch, *more: Batch, algorithm: Any, task: TaskInfo) -> Batch:
    """Turns scores into ``advantages`` and ``returns``, float32 ``[rows, R]``, 0 after the end of each response.

    Args:
        responses: columns of a rollout.
        rewards: ``score`` of each response, the same groups in the same order. ``kept`` (bool ``[rows]``, optional)
            marks the samples that count: the others get zero advantage and mask, and so does the rest of a group
            with fewer than two samples left for a baseline.
        more: what the estimator needs besides, see :func:`advantage_stage`.
        algorithm: the options of section ``algorithm``: adv_estimator and those that it reads.
        task: takes verl's metrics of scores, advantages and lengths over the samples that count; with ``kept`` also
            ``reward/dropped_samples`` and ``reward/dropped_groups``, the step's samples and groups that train nothing.

    Returns:
        ``advantages`` and ``returns``; the advantages of a group of two or more equal scores are exactly 0 (before the
        whitening of the estimators that whiten; REINFORCE++ compares the whole batch). With ``kept`` also
        ``response_mask``, int64 ``[rows, R]``, 0 for the samples that do not count; and with a rollout correction that
        rejects, 0 for the tokens that it rejects.

    Raises:
        DataError: the rewards lack a column that the estimator reads, or a number is not finite, or a score so large
            that its advantages may not be; with the sample.
        DataflowError: responses and rewards have different groups.
    """
    import torch

    task.log(token_metrics(responses))
    sampled = responses.only(sampled_mask="response_mask")  # before a correction rejects tokens
    data = responses.merge(sampled, rewards, *(_for_rows(field, responses) for field in more))
    mask, counts = data["response_mask"], torch.ones(len(data), dtype=torch.bool)
    # A critic learns from the advantages' mask, as it reads no log-probs, which have that of a correction.
    masks = "kept" in data or any("response_mask" in field for field in more)
    if "kept" in data:
        counts = _counting(data, ESTIMATORS[algorithm.adv_estimator])
        trained = len(np.unique(data.groups[counts.numpy()]))
        dropped = {"samples": int((~counts).sum()), "groups": len(data.ids) - trained}
        task.log({f"reward/dropped_{what}": Sum(n) for what, n in dropped.items()})
        mask = mask * counts[:, None]
    whole = (torch.zeros(mask.shape),) * 2
    if counts.any():
        few = data if counts.all() else data.rows(counts.numpy())
        estimated = _estimate(few, algorithm, task)
        same = estimated[0] is estimated[1]  # as of most estimators: one tensor then, which travels once
        spread = [_spread(values, counts).masked_fill(mask == 0, 0.0) for values in estimated[: 1 if same else 2]]
        whole = (spread[0], spread[-1])
    columns = {"advantages": whole[0], "returns": whole[1]}
    return responses.like(**columns, **({"response_mask": mask} if masks else {}))


def _for_rows(field: Batch, responses: Batch) -> Batch:
    """Returns a field of one row a group with that row for each response of the group; others as they are."""
    if len(field) == len(responses):
        return field
    row_of = dict(zip(field.groups.tolist(), range(len(field)), strict=True))
    return field.rows([row_of[g] for g in responses.groups.tolist()])


def _counting(data: Batch, estimator: Estimator) -> torch.Tensor:
    """Returns which samples count, bool ``[rows]``: those that were kept, if their group has a baseline left."""
    import torch

    kept: torch.Tensor = data["kept"]
    if "baseline_kept" in data:
        kept = kept & data["baseline_kept"]
    if estimator.against != "group":
        return kept
    _, group, size = np.unique(data.groups, return_inverse=True, return_counts=True)
    left = np.bincount(group, weights=kept.numpy())
    # verl uses the raw score of a single sample as its advantage. That is right only for groups of one from the start.
    whole = (left >= 2) | (left == size)
    return kept & torch.from_numpy(whole[group])


def _spread(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Returns the values in the rows that count, 0 in the others."""
    whole = values.new_zeros((len(counts), *values.shape[1:]))
    whole[counts] = values
    return whole


def _of_equal_scores(data: Batch, estimator: Estimator) -> torch.Tensor:
    """Returns which samples have the same score as all samples they are compared with, bool ``[rows]``.

    False for the single sample of a group of one, which is compared with none, and if tokens have rewards of their own.
    """
    import torch

    if estimator.against == "nothing" or "old_log_probs" in estimator.needs or "kl_penalty" in data:
        return torch.zeros(len(data), dtype=torch.bool)
    where = np.zeros_like(data.groups) if estimator.against == "batch" else data.groups
    _, group, size = np.unique(where, return_inverse=True, return_counts=True)
    first = data["score"].float().numpy()[np.unique(group, return_index=True)[1]]
    differs = np.bincount(group, weights=data["score"].float().numpy() != first[group])
    return torch.from_numpy(((differs == 0) & (size > 1))[group])


def _needed(samples: Batch, algorithm: Any) -> Batch:
    """Returns the columns that estimator and metrics read; the others, most of a batch's bytes, stay unread."""
    import torch

    names = ["response_mask", "score", *_READ]
    names += ["attention_mask"] if algorithm.gdpo_reward_keys else []
    room = samples.shape("response_mask")[1]
    whole, response = (torch.from_numpy(samples.nonzero("attention_mask", last)) for last in (None, room))
    # verl counts the tokens itself only if these are missing, tools' answers among those of a response; of prompts and
    # responses it reads the width alone.
    own = torch.from_numpy(samples.nonzero("sampled_mask"))
    lengths = {"prompt_length": (whole - response).float(), "response_length": own.float()}
    widths = {name: torch.zeros(()).expand(samples.shape(name)) for name in ("prompts", "responses")}
    return samples.only(*(name for name in names if name in samples)).merge(samples.like(**lengths, **widths))


def _estimate(samples: Batch, algorithm: Any, task: TaskInfo) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns verl's ``advantages`` and ``returns`` of the samples, and logs verl's metrics of them.

    Where the mask is 0, they may be anything: GAE leaves numbers behind the end of a response, OPO NaN in a group that
    a correction rejects as a whole.
    """
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    name, estimator = algorithm.adv_estimator, ESTIMATORS[algorithm.adv_estimator]
    data = _needed(samples, algorithm).to_dataproto()
    mask = data.batch["response_mask"]
    scores = torch.zeros(mask.shape, dtype=torch.float32)
    # The score goes to the last token that the model sampled; tokens of tools' answers may lie between its turns.
    last = torch.from_numpy(samples.last("sampled_mask"))
    scores[torch.arange(len(mask)), last] = data.batch["score"].float()
    rewards = scores - data.batch["kl_penalty"] if "kl_penalty" in data.batch else scores
    check_finite(data.batch["score"], "the score", samples, task, most=LARGEST_SCORE)
    for column, what in _READ.items():
        if column in data.batch:
            values = data.batch[column]
            check_finite(values, what, samples, task, counts=mask if values.ndim > 1 else None)
    equal = _of_equal_scores(samples, estimator)
    config = AlgoConfig(
        adv_estimator=name,
        gamma=algorithm.gamma,
        lam=algorithm.lam,
        norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        gdpo_reward_keys=algorithm.gdpo_reward_keys or None,
        gdpo_reward_weights=algorithm.gdpo_reward_weights or None,
    )
    given = {
        # Zeros minus their mean are exactly 0; other equal numbers minus their mean may differ in the last digit.
        "token_level_rewards": rewards.masked_fill(equal[:, None], 0.0) if estimator.relative else rewards,
        "response_mask": mask,
        "index": data.non_tensor_batch["uid"],
        "config": config,
        "gamma": algorithm.gamma,
        "lam": algorithm.lam,
        "norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo,
        **{column: data.batch[column] for column in _READ if column in data.batch},
    }
    if config.gdpo_reward_keys:  # without them, GDPO takes the score
        given |= {"non_tensor_batch": _rewards(samples, algorithm, task), "batch": data.batch}
    estimate = get_adv_estimator_fn(name)
    # Some of verl's estimators take an option as an argument, some from the configuration.
    takes = inspect.signature(estimate).parameters
    # verl's estimators that whiten need two tokens. One alone, or none where a correction rejects all, trains nothing.
    tokens = int(samples.nonzero("response_mask").sum())
    if tokens > (1 if estimator.whole_batch else 0):
        advantages, returns = estimate(**{key: value for key, value in given.items() if key in takes})
    else:
        advantages, returns = torch.zeros_like(scores), torch.zeros_like(scores)
    if _whitens_later(algorithm):
        advantages = returns - data.batch["values"]  # verl's GAE returns them whitened
    if not estimator.relative:
        advantages = advantages.masked_fill(equal[:, None], 0.0)
        returns = advantages if name == "gpg" else returns
    check_finite(advantages, "the advantage", samples, task, counts=mask)
    same, advantages = returns is advantages, advantages.float()
    returns = advantages if same else returns.float()
    found = {"token_level_scores": scores, "token_level_rewards": rewards, "advantages": advantages, "returns": returns}
    for column, values in found.items():
        data.batch[column] = values
    metrics = compute_data_metrics(data, use_critic="values" in estimator.needs)
    # verl takes what is as long as the longest possible for cut off, also a response that ended there.
    clipped = dict.fromkeys((CLIP_RATIO, "response_length_non_aborted/clip_ratio"), float(cut_off(samples).mean()))
    cut = "prompt_truncated" in samples and np.mean(samples["prompt_truncated"].astype(bool))
    clipped["prompt_length/clip_ratio"] = float(cut)
    metrics |= {name: share for name, share in clipped.items() if np.isfinite(metrics[name])}
    metrics = _counted(metrics, data.batch, samples)
    # Means over no tokens are NaN, which would hide those of the step's other parts.
    task.log({name: value for name, value in metrics.items() if tokens or np.isfinite(value)})
    return advantages, returns


def _counted(metrics: Mapping[str, Any], data: Any, samples: Batch) -> dict[str, float]:
    """Returns verl's metrics of a part with what each counts, and the mean score of each ``data_source``."""
    whole = data["response_length"] > 0  # verl leaves a response without tokens out of scores
    of = dict.fromkeys(("advantages", "returns", "values", "vf_explained_var"), int(data["response_mask"].sum()))
    of |= dict.fromkeys(("score", "rewards"), int(whole.sum()))
    found = {}
    for name, value in metrics.items():
        counted = int(whole.sum()) if "non_aborted" in name else of.get(name.split("/")[1], len(samples))
        found[name] = Mean(value, counted) if by_name(name) is None else float(value)
    if "data_source" in samples:
        scores, sources = data["token_level_scores"].sum(-1).numpy(), np.array(samples["data_source"], dtype=str)
        for source in np.unique(sources[whole.numpy()]):
            those = scores[whole.numpy() & (sources == source)]
            found[f"critic/score/{source}/mean"] = Mean(those.mean(), len(those))
    return found


def _rewards(samples: Batch, algorithm: Any, task: TaskInfo) -> dict[str, np.ndarray]:
    """Returns the numbers, all finite, that GDPO normalises each on its own, by their keys."""
    import torch

    found = {}
    for key in algorithm.gdpo_reward_keys:
        values = np.asarray(samples[key] if key in samples else [None] * len(samples))
        if missing := sum(value is None or isinstance(value, str) for value in values):
            raise DataError(
                f"algorithm.gdpo_reward_keys: {missing} of {len(values)} samples have no number '{key}'; let the "
                f"reward function return {{'score': ..., '{key}': ...}} for each, and reward.on_failure drop those "
                "that fail (score:X gives a score alone)."
            )
        numbers = torch.tensor([float(value) for value in values], dtype=torch.float64)
        check_finite(numbers, f"'{key}' (algorithm.gdpo_reward_keys)", samples, task, most=LARGEST_SCORE)
        found[key] = values
    return found


def check_finite(
    values: torch.Tensor,
    what: str,
    samples: Batch,
    task: TaskInfo,
    *,
    counts: torch.Tensor | None = None,
    most: float = 3e38,
) -> None:
    """Checks numbers of samples, ``[rows]`` or ``[rows, R]``, before one that is NaN makes the whole update NaN.

    ``counts`` says which of them count (None: all); ``what`` they are, for the message of the DataError with the
    sample.
    """
    bad = ~(values.abs() <= most)
    bad = bad if counts is None else bad & (counts != 0)
    if not bad.any():
        return
    row = int(bad.reshape(len(bad), -1).any(dim=1).nonzero()[0])
    group = int(samples.groups[row])
    first = samples.groups.tolist().index(group)
    value, why = float(values[row][bad[row]].reshape(-1)[0]), "it must be a finite number"
    if abs(value) > most:
        why += f" of at most {most:g}, as float32 cannot hold the advantages of a larger one"
    raise DataError(f"{task.stage}[{task.step}]: {what} of sample {row - first} of group {group} is {value:g}; {why}.")
