"""Several rewards as one score: a judge's, a rule's, and a penalty for length, by declared weights.

    responses -> rule_score ------------> rule_scores -+
    responses -> reward_request ~> reward_collect -----+-> combine -> scores -> advantage

The rule takes no time worth waiting for, so a part of a step waits for the judge alone, and the timeline says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dataflow.batch import Batch
from dataflow.errors import ConfigError, nearest
from dataflow.graph import TaskInfo, stage
from dataflow.stages.validate import scores_by

SOURCES = ("judge", "rule", "length")


def check_weights(weights: Mapping[str, float]) -> None:
    """Checks the weights of :func:`combine`.

    Raises:
        ConfigError: a source is unknown, a weight is negative, or none counts.
    """
    for name, weight in weights.items():
        if name not in SOURCES:
            raise ConfigError(f"weights: there is no reward '{name}'{nearest(name, SOURCES) or '.'}")
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"weights: {name}={weight:g}; give a finite number of at least 0.")
    if not any(weights.get(name, 0.0) for name in ("judge", "rule")):
        raise ConfigError("weights: neither judge nor rule counts; give one of them a weight above 0.")


@stage(writes="rule_scores", on="controller")
def rule_score(responses: Batch, *, compute_score: Callable[..., Any], task: TaskInfo) -> Batch:
    """Returns ``rule_score``, float32 ``[rows]``, by a function that takes no time worth waiting for.

    Args:
        responses: with the columns ``data_source``, ``response_text``, ``ground_truth`` and, optionally,
            ``extra_info``.
        compute_score: takes verl's four keywords and returns a number.
        task: takes ``reward/rule/mean``.
    """
    import torch

    scores = torch.tensor(scores_by(compute_score, responses), dtype=torch.float32)
    task.log({"reward/rule/mean": float(scores.mean())})
    return responses.like(rule_score=scores)


@stage(writes="scores", on="controller", splittable=True)
def combine(
    responses: Batch,
    rewards: Batch,
    rule_scores: Batch | None = None,
    *,
    weights: Mapping[str, float],
    length: int,
    task: TaskInfo,
) -> Batch:
    """Returns the rewards with ``score`` replaced by the weighted sum of what each source says.

    Args:
        responses: columns of a rollout, of whose ``response_mask`` the lengths are counted.
        rewards: of the judge; the same groups in the same order. A sample that the failure rule dropped stays dropped.
        rule_scores: of :func:`rule_score`; None without a rule.
        weights: of ``judge``, ``rule`` and ``length``, each at least 0; a source without a weight does not count.
        length: longest response, in tokens; one that long has the whole penalty ``weights["length"]``, a shorter one a
            share of it.
        task: takes ``reward/judge/mean``, ``reward/length/mean`` (the penalty) and ``reward/combined/mean``.

    Returns:
        The columns of ``rewards``; ``score``, and its parts ``judge_score``, ``rule_score`` and ``length_penalty``,
        float32 ``[rows]``.
    """
    check_weights(weights)
    judged = rewards["score"]
    penalty = responses["response_mask"].sum(dim=1).float() / length
    parts = {"judge_score": judged, "length_penalty": penalty}
    score = weights.get("judge", 0.0) * judged - weights.get("length", 0.0) * penalty
    if rule_scores is not None:
        parts["rule_score"] = rule_scores["rule_score"]
        score = score + weights.get("rule", 0.0) * parts["rule_score"]
    kept = ~judged.isnan()
    if kept.any():
        named = {"judge": judged, "length": penalty, "combined": score}
        task.log({f"reward/{name}/mean": float(values[kept].mean()) for name, values in named.items()})
    return Batch(rewards.groups, {**rewards.columns, **parts, "score": score}, rewards.meta)
