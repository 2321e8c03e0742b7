"""The advantage stage: numbers computed by hand, parts against the whole, and errors."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.algorithms.estimators import ESTIMATORS
from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.errors import DataError
from dataflow.graph import TaskInfo
from dataflow.metrics import of_step
from dataflow.stages.advantage import advantage, advantage_stage

heavy = pytest.mark.heavy
WHOLE_BATCH = [name for name, found in ESTIMATORS.items() if found.whole_batch and not found.needs]
GROUPWISE = [name for name, found in ESTIMATORS.items() if not found.whole_batch and not found.needs]
FED = {"gae": "values", "remax": "reward_baselines"} | dict.fromkeys(
    ("optimal_token_baseline", "tir_optimal_token_baseline"), "old_log_probs"
)
P, R = 3, 5


def step(scores: list[list[float]], lengths: list[list[int]]) -> tuple[Batch, Batch]:
    """Returns responses of these lengths, and their rewards, by group."""
    n = len(scores[0])
    groups = np.repeat(np.arange(len(scores)), n)
    length = torch.tensor(lengths).reshape(-1, 1)
    mask = (torch.arange(R) < length).long()
    whole = torch.cat([torch.ones(len(groups), P, dtype=torch.long), mask], dim=1)
    responses = Batch(
        groups,
        {
            "prompts": torch.full((len(groups), P), 7),
            "responses": mask * 8,
            "attention_mask": whole,
            "response_mask": mask,
            "response_text": ["so"] * len(groups),
        },
        {"weights_version": 3},
    )
    return responses, Batch(groups, {"score": torch.tensor(scores).reshape(-1)}, {"judge": "told"})


def options(name: str = "grpo", by_std: bool = True, **keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig(adv_estimator=name, norm_adv_by_std_in_grpo=by_std, **keys)


def random_step(groups: int = 6, n: int = 4) -> tuple[Batch, Batch]:
    draw = np.random.default_rng(0)
    scores = draw.random((groups, n)).astype(np.float32)
    scores[0] = 1.0  # a group that all got right
    return step(scores.tolist(), draw.integers(1, R + 1, (groups, n)).tolist())


def without_tokens(task: TaskInfo) -> dict[str, float]:
    """Returns a task's metrics without the counts of tokens, among which those of dropped samples are."""
    return {name: value for name, value in task.metrics.items() if not name.startswith("perf/")}


@heavy
def test_grpo_by_hand() -> None:
    responses, rewards = step([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]], [[2, 5, 1, 3], [1, 2, 3, 4]])
    task = TaskInfo(step=1)
    result = advantage(responses, rewards, algorithm=options(), task=task)
    # Mean 0.25, standard deviation 0.5 (of a sample): 1.5 and three times -0.5; equal scores teach nothing.
    by_row = torch.tensor([1.5, -0.5, -0.5, -0.5, 0, 0, 0, 0])[:, None] * responses["response_mask"]
    assert result.names == ("advantages", "returns")
    assert result["advantages"].dtype == torch.float32
    torch.testing.assert_close(result["advantages"], by_row, atol=1e-5, rtol=0)
    assert torch.equal(result["returns"], result["advantages"])
    assert result.groups.tolist() == responses.groups.tolist()
    assert result.meta == {"weights_version": 3}
    expected = {
        "critic/score/mean": 0.625,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 0.625,
        "critic/advantages/max": 1.5,
        "critic/advantages/min": -0.5,
        "critic/advantages/mean": (2 * 1.5 - 9 * 0.5) / 21,
        "response_length/mean": 21 / 8,
        "response_length/max": 5.0,
        "response_length/min": 1.0,
        "response_length/clip_ratio": 1 / 8,
        "prompt_length/clip_ratio": 0,
    }
    assert {name: task.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)


@heavy
def test_a_length_is_that_of_the_models_own_tokens_and_a_response_is_cut_off_if_its_engine_says_so() -> None:
    responses, rewards = step([[1.0, 0.0]], [[5, 4]])
    mask = responses["response_mask"].clone()
    mask[1, 1:3] = 0  # a tool's answer between two turns
    more = {"response_mask": mask, "finish_reason": ["stop", "length"], "prompt_truncated": [True, False]}
    task = TaskInfo(step=1)
    advantage(responses.merge(responses.like(**more)), rewards, algorithm=options(), task=task)
    names = ("mean", "max", "min", "clip_ratio")
    assert [task.metrics[f"response_length/{name}"] for name in names] == [3.5, 5, 2, 0.5]
    assert [task.metrics[f"response_length_non_aborted/{name}"] for name in names] == [3.5, 5, 2, 0.5]
    assert task.metrics["prompt_length/clip_ratio"] == 0.5
    assert (task.metrics["perf/response_tokens"], task.metrics["perf/total_num_tokens"]) == (7, 9 + 2 * P)


@heavy
@pytest.mark.parametrize("name", GROUPWISE)
@pytest.mark.parametrize("parts", [2, 6])
def test_a_part_gets_what_the_whole_would_give_it(name: str, parts: int) -> None:
    responses, rewards = random_step()
    whole = advantage(responses, rewards, algorithm=options(name), task=TaskInfo(step=1))
    assert whole["advantages"].any()
    for part in responses.split(parts):
        alone = advantage(part, rewards.select(part.ids), algorithm=options(name), task=TaskInfo(step=1))
        for column in ("advantages", "returns"):
            assert torch.equal(alone[column], whole.select(part.ids)[column])


@heavy
@pytest.mark.parametrize("name", WHOLE_BATCH)
def test_estimators_said_to_need_the_whole_batch_do(name: str) -> None:
    responses, rewards = random_step()
    rewards = rewards.like(score=rewards["score"] * (rewards["score"] > 0.3))
    whole = advantage(responses, rewards, algorithm=options(name), task=TaskInfo(step=1))
    part = responses.split(2)[1]
    alone = advantage(part, rewards.select(part.ids), algorithm=options(name), task=TaskInfo(step=1))
    assert not torch.allclose(alone["advantages"], whole.select(part.ids)["advantages"], atol=1e-3)


@heavy
def test_every_estimator_of_verl_is_accounted_for() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    assert set(ADV_ESTIMATOR_REGISTRY) == set(ESTIMATORS)


def test_the_error_gives_the_reason_why_a_stage_needs_the_whole_batch() -> None:
    assert advantage.per == "part"
    assert advantage.whole_batch is not None
    for name, estimator in ESTIMATORS.items():
        why = advantage.whole_batch({"algorithm": options(name)})
        assert why == (f"adv_estimator '{name}' {estimator.whole_batch}" if estimator.whole_batch else None)
        assert why is None or "whole batch" in why


def test_the_stage_reads_what_its_algorithm_needs() -> None:
    def fields(**keys: Any) -> tuple[str, ...]:
        return tuple(read.field for read in advantage_stage(AlgorithmConfig(**keys)).reads)[2:]

    for name in ESTIMATORS:
        assert fields(adv_estimator=name) == ((FED[name],) if name in FED else ())
    rejects = {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1"}
    assert fields(**rejects) == ("correction",)
    assert fields(**rejects, bypass_mode=True) == ()
    assert fields(adv_estimator="gae", use_kl_in_reward=True) == ("values", "kl_penalty")
    assert fields(rollout_is="token") == ()
    weighs = {"adv_estimator": "optimal_token_baseline", "rollout_is": "token"}
    assert fields(**weighs) == ("old_log_probs", "correction")


def feed(name: str, responses: Batch) -> Batch:
    """Returns the field that an estimator needs, at random."""
    draw = torch.Generator().manual_seed(1)
    mask = responses["response_mask"]
    if name == "remax":
        ids = responses.ids
        return Batch(ids, {"reward_baselines": torch.rand(len(ids), generator=draw)})
    columns = {column: torch.rand(mask.shape, generator=draw) * mask for column in ("values", "sum_pi_squared")}
    return responses.like(**columns, old_log_probs=-torch.rand(mask.shape, generator=draw) * mask)


@heavy
@pytest.mark.parametrize("name", FED)
def test_estimators_that_need_more_are_the_same_for_parts_or_need_the_whole(name: str) -> None:
    responses, rewards = random_step()
    more, stage = feed(name, responses), advantage_stage(options(name, lam=0.95))
    algorithm = stage.services["algorithm"]
    whole = stage(responses, rewards, more, algorithm=algorithm, task=TaskInfo(step=1))
    assert whole["advantages"].any()
    assert not whole["advantages"][responses["response_mask"] == 0].any()
    same = []
    for part in responses.split(2):
        alone = stage(part, rewards.select(part.ids), more.select(part.ids), algorithm=algorithm, task=TaskInfo(step=1))
        same.append(torch.equal(alone["advantages"], whole.select(part.ids)["advantages"]))
    assert all(same) == (ESTIMATORS[name].whole_batch is None)


@heavy
def test_a_group_whose_greedy_response_failed_trains_nothing() -> None:
    responses, rewards = random_step(groups=2)
    baselines = Batch(
        [0, 1], {"reward_baselines": torch.tensor([0.5, 0.0]), "baseline_kept": torch.tensor([True, False])}
    )
    stage = advantage_stage(options("remax"))
    kept = with_kept(rewards, [[1, 1, 0, 1], [1, 1, 1, 1]])
    result = stage(responses, kept, baselines, algorithm=stage.services["algorithm"], task=TaskInfo(step=1))
    assert result["response_mask"].any(dim=1).tolist() == [True, True, False, True, False, False, False, False]
    # Without a score of the group's others, a single response still has its greedy one.
    lone = stage(
        responses, with_kept(rewards, [[1, 0, 0, 0], [0] * 4]), baselines, algorithm=options("remax"), task=TaskInfo(1)
    )
    assert lone["advantages"][0, 0].item() == pytest.approx(rewards["score"][0].item() - 0.5)


@heavy
def test_gdpo_normalises_each_reward_on_its_own() -> None:
    responses, rewards = random_step()
    right, short = [1.0, 0.0] * 12, [float(row % 3) for row in range(24)]
    rewards = rewards.merge(rewards.like(right=right, short=short))
    keys = {"gdpo_reward_keys": ["right", "short"]}
    both = advantage(responses, rewards, algorithm=options("gdpo", **keys), task=TaskInfo(1))["advantages"]
    one = options("gdpo", **keys, gdpo_reward_weights=[1.0, 0.0])
    first = advantage(responses, rewards, algorithm=one, task=TaskInfo(1))["advantages"]
    assert not torch.equal(both, first)
    assert (first[0::2, 0] > 0).all()
    assert (first[1::2, 0] < 0).all()
    # Columns that a stage made are tensors, such as judge_score of pipelines/two_judges.py.
    made = rewards.merge(rewards.like(right=torch.tensor(right), short=torch.tensor(short)))
    again = advantage(responses, made, algorithm=options("gdpo", **keys), task=TaskInfo(1))["advantages"]
    assert torch.equal(again, both)
    scored = advantage(responses, made, algorithm=options("gdpo", gdpo_reward_keys=["score"]), task=TaskInfo(1))
    alone = advantage(responses, made, algorithm=options("gdpo"), task=TaskInfo(1))
    assert torch.allclose(scored["advantages"], alone["advantages"], atol=1e-6)
    some = rewards.merge(rewards.like(right=[None, *right[1:]]))
    with pytest.raises(DataError, match=r"1 of 24 samples have no 'right'; .* reward.on_failure drop"):
        advantage(responses, some, algorithm=options("gdpo", **keys), task=TaskInfo(1))
    with pytest.raises(DataError, match="the rewards have no numbers 'form'; let the reward function return"):
        advantage(responses, rewards, algorithm=options("gdpo", gdpo_reward_keys=["form"]), task=TaskInfo(1))


@heavy
def test_rejected_tokens_get_no_advantage_but_their_score_counts_in_the_group() -> None:
    responses, rewards = step([[1.0, 0.0, 0.0, 0.0]], [[2, 5, 1, 3]])
    stage = advantage_stage(options(rollout_rs="token_k2", rollout_rs_threshold="0.1"))
    mask = responses["response_mask"].clone()
    mask[0] = 0  # a rejected response
    mask[1, 4] = 0  # a rejected last token
    corrected = responses.like(old_log_probs=torch.zeros(4, R), response_mask=mask)
    result = stage(responses, rewards, corrected, algorithm=stage.services["algorithm"], task=TaskInfo(step=1))
    expected = torch.tensor([1.5, -0.5, -0.5, -0.5])[:, None] * mask
    torch.testing.assert_close(result["advantages"], expected, atol=1e-5, rtol=0)
    assert torch.equal(result["response_mask"], mask)


@heavy
@pytest.mark.parametrize("keep", [None, [1, 1, 0, 1]], ids=["all", "one dropped"])
def test_a_critic_does_not_learn_from_what_a_correction_rejects(keep: list[int] | None) -> None:
    responses, rewards = step([[1.0, 0.0, 0.0, 0.5]], [[2, 5, 1, 3]])
    algorithm = options("gae", rollout_rs="token_k2", rollout_rs_threshold="0.1")
    stage = advantage_stage(algorithm)
    mask = responses["response_mask"].clone()
    mask[0], mask[1, 4] = 0, 0
    guessed = responses.like(values=torch.full((4, R), 0.25))
    corrected = responses.like(old_log_probs=torch.zeros(4, R), response_mask=mask)
    scores = rewards if keep is None else with_kept(rewards, [keep])
    result = stage(responses, scores, guessed, corrected, algorithm=algorithm, task=TaskInfo(step=1))
    # What critic_update reads: verl's value loss takes the mean over this mask.
    read = responses.merge(guessed, result)["response_mask"]
    assert torch.equal(read, mask if keep is None else mask * torch.tensor(keep)[:, None])


@heavy
@pytest.mark.parametrize("name", [*GROUPWISE, *WHOLE_BATCH])
@pytest.mark.parametrize("left", [0, 1, 12])
def test_what_a_correction_rejects_as_a_whole_leaves_finite_advantages(name: str, left: int) -> None:
    responses, rewards = random_step(groups=2, n=4)
    algorithm = options(name, rollout_rs="token_k2", rollout_rs_threshold="0.1")
    stage = advantage_stage(algorithm)
    mask = responses["response_mask"].clone()
    mask[: 4 if left > 1 else 8] = 0  # the first group, or all
    mask[-1, 0] = left > 0  # but one token
    corrected = responses.like(old_log_probs=torch.zeros(8, R), response_mask=mask)
    info = TaskInfo(step=1)
    result = stage(responses, rewards, corrected, algorithm=algorithm, task=info)
    for column in ("advantages", "returns"):
        assert torch.isfinite(result[column]).all()
        assert not result[column][mask == 0].any()
    assert left <= 1 or result["advantages"].any()
    assert all(np.isfinite(number) for number in info.metrics.values())


# Samples that were not kept: `kept` beside their scores.


def with_kept(rewards: Batch, kept: list[list[int]]) -> Batch:
    """Returns the rewards with NaN for the scores of samples that were not kept."""
    keep = torch.tensor(kept, dtype=torch.bool).reshape(-1)
    return rewards.merge(rewards.like(kept=keep, score=rewards["score"].masked_fill(~keep, torch.nan)))


@heavy
@pytest.mark.parametrize("name", [*GROUPWISE, *WHOLE_BATCH])
def test_dropped_samples_count_neither_in_the_baseline_nor_in_the_metrics(name: str) -> None:
    responses, rewards = random_step()
    keep = [[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 0], [1, 1, 1, 1], [1, 1, 0, 1]]
    rows = [row for row, kept in enumerate(np.ravel(keep)) if kept]
    fewer, alone = TaskInfo(step=1), TaskInfo(step=1)
    result = advantage(responses, with_kept(rewards, keep), algorithm=options(name), task=fewer)
    expected = advantage(responses.rows(rows), rewards.rows(rows), algorithm=options(name), task=alone)
    assert expected["advantages"].any()
    left_out = [row for row in range(24) if row not in rows]
    for column in ("advantages", "returns"):
        assert torch.equal(result[column][rows], expected[column])
        assert not result[column][left_out].any()
    assert torch.equal(result["response_mask"][rows], responses["response_mask"][rows])
    assert not result["response_mask"][left_out].any()
    dropped = {"reward/dropped_samples": 8.0, "reward/dropped_groups": 1.0}
    assert without_tokens(fewer) == {**without_tokens(alone), **dropped}


@heavy
@pytest.mark.parametrize("name", [*GROUPWISE, *WHOLE_BATCH])
def test_a_lone_sample_has_no_baseline_and_is_left_out_too(name: str) -> None:
    responses, rewards = step([[0.9, 0.5, 0.1], [0.7, 0.0, 0.2]], [[2, 5, 1], [3, 2, 4]])
    task = TaskInfo(step=1)
    result = advantage(responses, with_kept(rewards, [[1, 1, 1], [1, 0, 0]]), algorithm=options(name), task=task)
    trains = result["response_mask"].any(dim=1).tolist()
    # REINFORCE++ compares with the whole batch, so it needs no second sample of the group.
    lone = name == "reinforce_plus_plus"
    assert trains == [True, True, True, lone, False, False]
    assert bool(result["advantages"][3].any()) == lone
    assert task.metrics["reward/dropped_samples"] == (2.0 if lone else 3.0)
    assert task.metrics["reward/dropped_groups"] == (0.0 if lone else 1.0)
    assert task.metrics["critic/score/min"] == pytest.approx(0.1)


@heavy
def test_groups_of_one_sample_keep_verls_advantage() -> None:
    responses, rewards = step([[0.9], [0.5], [0.1]], [[2], [5], [1]])
    task = TaskInfo(step=1)
    result = advantage(responses, with_kept(rewards, [[1], [0], [1]]), algorithm=options(), task=task)
    assert result["response_mask"].any(dim=1).tolist() == [True, False, True]
    assert result["advantages"][:, 0].tolist() == pytest.approx([0.9, 0, 0.1], abs=1e-5)
    assert task.metrics["reward/dropped_groups"] == 1.0


@pytest.mark.parametrize("keep", [[0, 0, 0, 0], [0, 1, 0, 0]], ids=["none kept", "one kept"])
def test_a_part_with_nothing_to_train_on_calls_no_estimator(keep: list[int]) -> None:
    responses, rewards = step([[1.0, 0.0, 0.0, 0.0]], [[2, 5, 1, 3]])
    task = TaskInfo(step=1)
    result = advantage(responses, with_kept(rewards, [keep]), algorithm=options(), task=task)
    for column in ("advantages", "returns", "response_mask"):
        assert result[column].shape == (4, R)
        assert not result[column].any()
    assert result["advantages"].dtype == result["returns"].dtype == torch.float32
    assert without_tokens(task) == {"reward/dropped_samples": 4.0, "reward/dropped_groups": 1.0}


@heavy
@pytest.mark.parametrize("name", ["grpo", "gae"])
@pytest.mark.parametrize("parts", [2, 3, 6])
def test_the_metrics_of_a_step_in_parts_are_those_of_the_whole_step(name: str, parts: int) -> None:
    draw, (responses, rewards) = np.random.default_rng(1), random_step()
    sources = [("minerva", "openai/gsm8k", "maxwell")[row % 3] for row in range(len(responses))]
    responses = responses.merge(responses.like(data_source=sources))
    # Parts keep between none and all of their samples.
    keep = (draw.random((6, 4)) < np.array([[1.0], [0.3], [0.0], [0.9], [0.6], [0.4]])).astype(int).tolist()
    rewards = with_kept(rewards, keep)
    algorithm = options(name, whiten="mini-batch")
    stage = advantage_stage(algorithm)
    more = [feed(name, responses)] if name in FED else []

    def logged(count: int) -> dict[str, float]:
        numbers: dict[str, list[float]] = {}
        for i, part in enumerate(responses.split(count)):
            task = TaskInfo(step=1, part=i, parts=count)
            stage(part, *(each.select(part.ids) for each in (rewards, *more)), algorithm=algorithm, task=task)
            for metric, value in pickle.loads(pickle.dumps(task.metrics)).items():
                numbers.setdefault(metric, []).append(value)
        return {metric: of_step(metric, values) for metric, values in numbers.items()}

    whole, split = logged(1), logged(parts)
    of_parts = whole.pop("critic/vf_explained_var", None), split.pop("critic/vf_explained_var", None)
    assert split == pytest.approx(whole, abs=1e-5)
    kept = np.array(keep, dtype=bool).ravel()
    if name == "grpo":
        kept &= np.repeat(np.array(keep).sum(axis=1) >= 2, 4)
    scores = rewards["score"].numpy()
    assert split["critic/score/mean"] == pytest.approx(scores[kept].mean())
    assert split["critic/score/minerva/mean"] == pytest.approx(scores[kept & (np.arange(24) % 3 == 0)].mean())
    assert [each is not None for each in of_parts] == [name == "gae"] * 2, "the mean of those of the parts"
    assert split["reward/dropped_samples"] > 0


@heavy
@pytest.mark.parametrize("name", [*GROUPWISE, *WHOLE_BATCH])
@pytest.mark.parametrize("by_std", [True, False])
def test_equal_scores_teach_nothing(name: str, by_std: bool) -> None:
    lengths = [[1 + (row + group) % R for row in range(8)] for group in range(4)]
    for score in (0.1, 0.3, 0.6, 100.1, -100.1):
        responses, rewards = step([[score] * 8] * 4, lengths)
        result = advantage(responses, rewards, algorithm=options(name, by_std), task=(task := TaskInfo(step=1)))
        assert not result["advantages"].any()
        assert task.metrics["critic/score/mean"] == pytest.approx(score)


@heavy
@pytest.mark.parametrize("name", [*GROUPWISE, "gpg"])
def test_equal_scores_beside_others_teach_nothing(name: str) -> None:
    others = [0.0, 1.0, 0.5, 0.0, 0.75, 0.0, 0.25, 0.5]
    responses, rewards = step([[100.1] * 8, others], [[1, 2, 3, 4] * 2] * 2)
    result = advantage(responses, rewards, algorithm=options(name), task=TaskInfo(step=1))
    assert not result["advantages"][:8].any()
    assert not result["returns"][:8].any()
    assert result["advantages"][8:].any()


@heavy
@pytest.mark.parametrize("name", ["gdpo", "reinforce_plus_plus_baseline"])
def test_equal_scores_are_the_same_to_what_whitens_whatever_they_are(name: str) -> None:
    others = [0.0, 1.0, 0.5, 0.0, 0.75, 0.0, 0.25, 0.5]
    found = []
    for score in (0.0, 100.1):
        responses, rewards = step([[score] * 8, others], [[1, 2, 3, 4] * 2] * 2)
        found.append(advantage(responses, rewards, algorithm=options(name), task=TaskInfo(step=1))["advantages"])
    assert torch.equal(*found)
