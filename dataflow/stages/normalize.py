"""Scores normalised by the mean and the standard deviation of all scores of the steps before (``normalize=running``).

    raw_rewards -> normalize_rewards -> rewards
        +--------> reward_moments -> reward_moments (of this step and those before, which the next step uses)

The scores of a step do not take part in its own normalisation: so they are the same in whatever parts and order, and by
however many agents, they are collected. The moments are a state of the graph, which checkpoints keep.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, TypeAlias

from dataflow.batch import Batch
from dataflow.errors import PipelineError
from dataflow.graph import Latest, Stage, TaskInfo, stage
from dataflow.reward_agent import MAIN, metric
from dataflow.stages.reward import rewards_field

if TYPE_CHECKING:
    import torch

Moments: TypeAlias = tuple[int, float, float]
"""Number, mean, and sum of the squared distances from the mean."""
_EQUAL = 1e-6
"""A deviation below this share of the mean is rounding: the scores were equal, and are not divided by it."""


@stage(writes="reward_moments", on="controller")
def reward_moments(raw_rewards: Batch, reward_moments: Moments | Latest | None) -> Moments:
    """Returns the moments of all scores up to this step, without those that a failure rule has set.

    Args:
        raw_rewards: of the whole step.
        reward_moments: of the steps before; None for the first one.
    """
    found = raw_rewards["score"].double()[_scored(raw_rewards)].tolist()
    count, mean, squares = reward_moments if isinstance(reward_moments, tuple) else (0, 0.0, 0.0)
    if not found:
        return count, mean, squares
    # fsum rounds once, whatever the order in which the groups have arrived.
    more, its = len(found), math.fsum(found) / len(found)
    spread, total = math.fsum((score - its) ** 2 for score in found), count + more
    squares += spread + (its - mean) ** 2 * count * more / total
    return total, mean + (its - mean) * more / total, squares


@stage(writes="rewards", on="controller", splittable=True)
def normalize_rewards(
    raw_rewards: Batch, reward_moments: Moments | Latest | None, *, agent: str = MAIN, task: TaskInfo
) -> Batch:
    """Returns the rewards with each ``score`` as its distance from the mean in deviations; ``raw_score`` is the score.

    Scores of the first step, for which there are no others, stay as they are, and so do those that a failure rule has
    set.

    Args:
        raw_rewards: of a part of the step.
        reward_moments: of the steps before; None for the first one.
        agent: the name of the agent that has scored.
        task: takes ``reward/running_mean`` and ``reward/running_std``, by which the step's scores are normalised.
    """
    raw = raw_rewards["score"]
    mean, deviation = _scale(reward_moments)
    task.log({metric(agent, "running_mean"): mean, metric(agent, "running_std"): deviation})
    score = ((raw.double() - mean) / deviation).float().where(_scored(raw_rewards), raw)
    return raw_rewards.like(**{**raw_rewards.columns, "score": score, "raw_score": raw})


@stage(writes="reward_baselines", on="controller")
def normalize_baselines(raw_baselines: Batch, reward_moments: Moments | Latest | None) -> Batch:
    """Returns the greedy responses' scores on the scale of the rewards that they are subtracted from."""
    mean, deviation = _scale(reward_moments)
    scores = (raw_baselines["reward_baselines"].double() - mean) / deviation
    return raw_baselines.like(**{**raw_baselines.columns, "reward_baselines": scores.float()})


def _scored(rewards: Batch) -> torch.Tensor:
    """Returns which rows have a score of the model, bool ``[rows]``."""
    import torch

    how = rewards.columns.get("request_how", [None] * len(rewards))
    return torch.tensor([each != "failed" for each in how]) & ~rewards["score"].isnan()


def _scale(moments: object) -> tuple[float, float]:
    """Returns the mean that is subtracted and the deviation that is divided by."""
    if not isinstance(moments, tuple):
        return 0.0, 1.0
    count, mean, squares = moments
    deviation = math.sqrt(squares / (count - 1)) if count > 1 else 0.0
    return mean, deviation if deviation > _EQUAL * max(1.0, abs(mean)) else 1.0


def with_running(stages: Sequence[Stage], agents: Collection[str]) -> list[Stage]:
    """Returns the stages of a pipeline with those that normalise the rewards of the agents of these names.

    Raises:
        PipelineError: a stage asks for rewards in another way.
    """
    found: list[Stage] = []
    for each in stages:
        name = each.host.name if each.host is not None else ""
        if name not in agents or each.role in ("requests", "validates"):
            found.append(each)
            continue
        rewards = rewards_field(name)
        moments = f"{'' if name == MAIN else f'{name}_'}reward_moments"
        renamed = {"rewards": rewards, "raw_rewards": f"raw_{rewards}", "reward_moments": moments}
        if each.collects and each.writes == (rewards,):
            found += [
                each.bind(renamed={rewards: f"raw_{rewards}"}),
                normalize_rewards.bind(name=f"normalize_{rewards}", renamed=renamed, agent=name),
                reward_moments.bind(name=moments, renamed=renamed),
            ]
        elif each.writes == normalize_baselines.writes:
            renamed |= {"raw_baselines": "raw_reward_baselines"}
            found += [
                each.bind(renamed={"reward_baselines": "raw_reward_baselines"}),
                normalize_baselines.bind(renamed=renamed),
            ]
        else:
            raise PipelineError(
                f"stage '{each.name}' asks for rewards of a model with normalize=running in a way of its own; give the "
                "model normalize=none."
            )
    return found


def normalizes(stages: Sequence[Stage], agent: str) -> bool:
    """Whether a stage normalises the rewards of an agent."""
    return any(f"raw_{rewards_field(agent)}" in each.writes for each in stages)
