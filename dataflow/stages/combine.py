"""Several rewards as one score: those of one or more agents and a penalty for length, by declared weights.

    responses -> reward_request ~> reward_collect -> rewards ------+
    responses -> rule_request ~> rule_collect -----> rule_rewards -+-> combine -> scores -> advantage

A part of a step waits for the slowest of the agents, and the timeline says which one that was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dataflow.batch import Batch
from dataflow.errors import ConfigError, nearest
from dataflow.graph import Read, Stage, TaskInfo
from dataflow.metrics import Mean
from dataflow.stages.advantage import check_finite
from dataflow.stages.reward import rewards_field
from dataflow.usercode.numeric import LARGEST_SCORE

LENGTH = "length"
"""The weight of the penalty for length."""
_REQUEST = "request_"
"""Columns of an agent that say how its requests went; the trace has them, too."""


def combine_stage(agents: Mapping[str, str], *, weights: Mapping[str, float], length: int) -> Stage:
    """Returns the stage ``combine``, which reads the rewards of several agents and writes ``scores``.

    Args:
        agents: the name of each agent, by the name of its weight.
        weights, length: see :func:`combine`.

    Raises:
        ConfigError: a weight is of no source or negative, or a source has none, so that it would be asked for nothing.
    """
    for name, weight in weights.items():
        if name not in (*agents, LENGTH):
            raise ConfigError(f"weights: there is no reward '{name}'{nearest(name, [*agents, LENGTH]) or '.'}")
        if not 0 <= weight < float("inf"):
            raise ConfigError(f"weights: {name}={weight:g}; give a finite number of at least 0.")
    for name in agents:
        if not weights.get(name):
            raise ConfigError(
                f"weights.{name}=0: its agent would be asked and paid for nothing; give it a weight, or leave the "
                "agent out of the pipeline."
            )
    return Stage(
        name="combine",
        fn=combine,
        # A field for each agent, so that the function's parameters cannot name them.
        reads=(Read("responses"), *(Read(rewards_field(agent)) for agent in agents.values())),
        writes=("scores",),
        on="controller",
        per="part",
        services={"sources": tuple(agents), "weights": dict(weights), "length": length},
        accepts=("sources", "weights", "length"),
    )


def combine(
    responses: Batch, *rewards: Batch, sources: Sequence[str], weights: Mapping[str, float], length: int, task: TaskInfo
) -> Batch:
    """Returns the first rewards with ``score`` replaced by the weighted sum of what each source says.

    Args:
        responses: columns of a rollout, of whose ``response_mask`` the lengths are counted.
        rewards: of each source; the same groups in the same order. A sample that the failure rule of one source dropped
            is dropped.
        sources: their names, in the same order.
        weights: of each source and of ``length``, each at least 0.
        length: longest response, in tokens; one that long has the whole penalty ``weights["length"]``, a shorter one a
            share of it.
        task: takes ``reward/SOURCE/mean`` of each source, ``reward/length/mean`` (the penalty) and
            ``reward/combined/mean``, over the samples that were not dropped.

    Returns:
        The columns of the first rewards; those of the others, with the source before their names; ``score``, and its
        parts ``SOURCE_score`` and ``length_penalty``, float32 ``[rows]``.

    Raises:
        DataError: a score is not finite, or so large that its advantages may not be.
    """
    import torch

    first = rewards[0]
    penalty = responses["response_mask"].sum(dim=1).float() / length
    parts = [-weights.get(LENGTH, 0.0) * penalty.double()]
    columns: dict[str, Any] = dict(first.columns)
    means = {LENGTH: penalty}
    for name, given in zip(sources, rewards, strict=True):
        means[name] = columns[f"{name}_score"] = given["score"]
        parts.append(weights[name] * given["score"].double())
        if given is first:
            continue
        own = [
            column for column in given.columns if column not in ("score", "kept") and not column.startswith(_REQUEST)
        ]
        columns |= {f"{name}_{column}": given[column] for column in own}
        if "kept" in given:
            columns["kept"] = columns["kept"] & given["kept"] if "kept" in columns else given["kept"]
    # Rounded once, to what advantages are computed in: sums that are equal but for rounding become equal scores.
    score = torch.stack(parts).sum(dim=0).float()
    known = columns["kept"] if "kept" in columns else torch.ones(len(score), dtype=torch.bool)
    check_finite(score, "the combined score", first, task, counts=known, most=LARGEST_SCORE)
    if known.any():
        means["combined"] = score
        of = int(known.sum())
        task.log({f"reward/{name}/mean": Mean(float(values[known].mean()), of) for name, values in means.items()})
    return Batch(first.groups, {**columns, "length_penalty": penalty, "score": score}, first.meta)
