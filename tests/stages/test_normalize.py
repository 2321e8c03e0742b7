"""A running normalisation: the same whatever the parts and their order, without the step's own scores."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.errors import PipelineError
from dataflow.graph import Read, TaskInfo, stage
from dataflow.running.services.hosting import reward_host
from dataflow.stages.normalize import (
    Moments,
    normalize_baselines,
    normalize_rewards,
    normalizes,
    reward_moments,
    with_running,
)

STEPS = [[1.5, -2.0, 3.25, 8.0], [0.1, 0.2, 0.3, 7.0], [-3.0, 4.0, 5.5, 6.0]]


def rewards(scores: list[float], **columns: object) -> Batch:
    return Batch([0, 0, 1, 1][: len(scores)], {"score": torch.tensor(scores), **columns})


def test_the_moments_are_those_of_all_scores_so_far_in_any_order() -> None:
    forth: Moments | None = None
    back: Moments | None = None
    for at, scores in enumerate(STEPS):
        forth, back = reward_moments(rewards(scores), forth), reward_moments(rewards(scores[::-1]), back)
        assert forth == back
        known = torch.tensor([score for step in STEPS[: at + 1] for score in step]).tolist()
        assert forth[:2] == (len(known), pytest.approx(statistics.mean(known)))
        assert forth[2] == pytest.approx(statistics.variance(known) * (len(known) - 1))


def test_a_score_is_its_distance_from_the_mean_of_earlier_steps_in_deviations() -> None:
    task = TaskInfo(step=1)
    first = normalize_rewards(rewards(STEPS[0]), None, task=task)
    assert first["score"].tolist() == first["raw_score"].tolist() == STEPS[0]
    moments = reward_moments(rewards(STEPS[0]), None)
    mean, deviation = statistics.mean(STEPS[0]), statistics.stdev(STEPS[0])
    second = normalize_rewards(rewards(STEPS[1]), moments, task=task)
    assert second["score"].tolist() == pytest.approx([(score - mean) / deviation for score in STEPS[1]])
    assert second["raw_score"].tolist() == pytest.approx(STEPS[1])
    part = normalize_rewards(rewards(STEPS[1]).rows([2, 3]), moments, task=task)
    assert part["score"].tolist() == second["score"][2:].tolist()
    baselines = Batch([0], {"reward_baselines": torch.tensor([mean])})
    assert normalize_baselines(baselines, moments)["reward_baselines"].tolist() == [0.0]


def test_scores_of_a_failure_rule_and_of_no_one_neither_count_nor_change() -> None:
    given = rewards([1.0, 3.0, -9.0, float("nan")], request_how=[None, "ledger", "failed", None])
    assert reward_moments(given, None) == (2, 2.0, 2.0)
    found = normalize_rewards(given, (2, 2.0, 2.0), task=TaskInfo(step=1))["score"].tolist()
    assert found[:3] == pytest.approx([-(0.5**0.5), 0.5**0.5, -9.0])
    assert found[3] != found[3]
    # Equal scores are not divided by their rounding.
    moments = reward_moments(rewards([0.1] * 4), None)
    found = normalize_rewards(rewards([0.1, 1.1, 0.1, 0.1]), moments, task=TaskInfo(step=2))["score"].tolist()
    assert found == pytest.approx([0.0, 1.0, 0.0, 0.0], abs=1e-6)


def test_a_recipe_normalises_the_agent_whose_model_says_so() -> None:
    module = load_pipeline_file(Path(__file__).parents[2] / "pipelines" / "two_judges.py")
    keys = ["reward.models.rm.url=http://h", "reward.models.rm.normalize=running", "rule.model=rm"]
    pipeline = module.pipeline(parse_overrides(module.Config, keys))
    assert (normalizes(pipeline.stages, "rule"), normalizes(pipeline.stages, "reward")) == (True, False)
    by_name = {each.name: each for each in pipeline.stages}
    assert by_name["rule_collect"].writes == ("raw_rule_rewards",)
    assert by_name["normalize_rule_rewards"].writes == ("rule_rewards",)
    assert Read("rule_reward_moments", "latest") in by_name["normalize_rule_rewards"].reads
    config = parse_overrides(module.Config, keys)

    @stage(writes="own", on="controller")
    def asks(responses: Batch, *, agent: object) -> None: ...

    with pytest.raises(PipelineError, match="stage 'asks' asks for rewards of a model with normalize=running"):
        with_running([asks.bind(agent=reward_host(config))], ["reward"])
