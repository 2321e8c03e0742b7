"""The advantage stage: numbers computed by hand, parts against the whole, and numbers that are refused."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from dataflow.algorithms import ESTIMATORS
from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.errors import DataError
from dataflow.graph import TaskInfo
from dataflow.metrics import of_step
from dataflow.stages.advantage import advantage, advantage_stage, check_finite, needs_whole_batch
from dataflow.usercode.numeric import LARGEST_SCORE

heavy = pytest.mark.heavy
ALONE = [name for name, found in ESTIMATORS.items() if not found.needs]
"""Estimators that read rewards alone."""
FED = {"gae": "values", "remax": "reward_baselines"} | dict.fromkeys(
    ("optimal_token_baseline", "tir_optimal_token_baseline"), "old_log_probs"
)
P, R = 3, 5
REJECTS = {"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1"}


def step(scores: list[list[float]], lengths: list[list[int]], room: int = R) -> tuple[Batch, Batch]:
    """Returns responses of these lengths, and their rewards, by group."""
    groups = np.repeat(np.arange(len(scores)), len(scores[0]))
    mask = (torch.arange(room) < torch.tensor(lengths).reshape(-1, 1)).long()
    whole = torch.cat([torch.ones(len(groups), P, dtype=torch.long), mask], dim=1)
    columns = {"prompts": whole[:, :P], "responses": mask * 8, "attention_mask": whole, "response_mask": mask}
    responses = Batch(groups, {**columns, "response_text": ["so"] * len(groups)}, {"weights_version": 3})
    return responses, Batch(groups, {"score": torch.tensor(scores).reshape(-1)}, {"judge": "told"})


def options(name: str = "grpo", **keys: Any) -> AlgorithmConfig:
    return AlgorithmConfig(adv_estimator=name, **keys)


def random_step(groups: int = 6, n: int = 4) -> tuple[Batch, Batch]:
    draw = np.random.default_rng(0)
    scores = draw.random((groups, n)).astype(np.float32)
    scores[0] = 1.0  # a group that all got right
    return step(scores.tolist(), draw.integers(1, R + 1, (groups, n)).tolist())


def feed(name: str, responses: Batch) -> list[Batch]:
    """Returns the field that an estimator needs, at random."""
    draw = torch.Generator().manual_seed(1)
    mask = responses["response_mask"]
    if name == "remax":
        return [Batch(responses.ids, {"reward_baselines": torch.rand(len(responses.ids), generator=draw)})]
    columns = {column: torch.rand(mask.shape, generator=draw) * mask for column in ("values", "sum_pi_squared")}
    found = responses.like(**columns, old_log_probs=-torch.rand(mask.shape, generator=draw) * mask)
    return [found] if name in FED else []


def with_kept(rewards: Batch, kept: list[list[int]]) -> Batch:
    """Returns the rewards with NaN for the scores of samples that were not kept."""
    keep = torch.tensor(kept, dtype=torch.bool).reshape(-1)
    return rewards.merge(rewards.like(kept=keep, score=rewards["score"].masked_fill(~keep, torch.nan)))


def estimated(algorithm: AlgorithmConfig, *fields: Batch, task: TaskInfo | None = None) -> Batch:
    stage = advantage_stage(algorithm)
    return stage(*fields, algorithm=algorithm, task=task or TaskInfo(step=1))


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
    assert (result.names, result.meta) == (("advantages", "returns"), {"weights_version": 3})
    assert result["advantages"].dtype == torch.float32
    torch.testing.assert_close(result["advantages"], by_row, atol=1e-5, rtol=0)
    assert torch.equal(result["returns"], result["advantages"])
    expected = {
        "critic/score/mean": 0.625, "critic/score/max": 1.0, "critic/score/min": 0.0, "critic/rewards/mean": 0.625,
        "critic/advantages/max": 1.5, "critic/advantages/min": -0.5,
        "critic/advantages/mean": (2 * 1.5 - 9 * 0.5) / 21,
        "response_length/mean": 21 / 8, "response_length/max": 5.0, "response_length/min": 1.0,
        "response_length/clip_ratio": 1 / 8, "prompt_length/clip_ratio": 0,
    }  # fmt: skip
    assert {name: task.metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)


@heavy
def test_a_length_is_that_of_the_models_own_tokens_and_a_response_is_cut_off_if_its_engine_says_so() -> None:
    responses, rewards = step([[1.0, 0.0]], [[5, 4]])
    mask = responses["response_mask"].clone()
    mask[1, 1:3] = 0  # a tool's answer between two turns
    more = {"response_mask": mask, "finish_reason": ["stop", "length"], "prompt_truncated": [True, False]}
    task = TaskInfo(step=1)
    advantage(responses.merge(responses.like(**more)), rewards, algorithm=options(), task=task)
    for name in ("response_length", "response_length_non_aborted"):
        assert [task.metrics[f"{name}/{what}"] for what in ("mean", "max", "min", "clip_ratio")] == [3.5, 5, 2, 0.5]
    assert task.metrics["prompt_length/clip_ratio"] == 0.5
    assert (task.metrics["perf/response_tokens"], task.metrics["perf/total_num_tokens"]) == (7, 9 + 2 * P)


@heavy
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_part_gets_what_the_whole_would_give_it_unless_the_estimator_says_otherwise(name: str) -> None:
    responses, rewards = random_step()
    rewards = rewards.like(score=rewards["score"] * (rewards["score"] > 0.3))
    fields, algorithm = [rewards, *feed(name, responses)], options(name, lam=0.95)
    whole = estimated(algorithm, responses, *fields)
    assert whole["advantages"].any()
    assert not whole["advantages"][responses["response_mask"] == 0].any()
    assert (needs_whole_batch({"algorithm": algorithm}) is None) == (ESTIMATORS[name].whole_batch is None)
    same = []
    for part in responses.split(3):
        alone = estimated(algorithm, part, *(each.select(part.ids) for each in fields))
        same += [torch.equal(alone[each], whole.select(part.ids)[each]) for each in ("advantages", "returns")]
    assert all(same) == (ESTIMATORS[name].whole_batch is None)


def test_the_stage_reads_what_its_algorithm_needs() -> None:
    def fields(**keys: Any) -> tuple[str, ...]:
        return tuple(read.field for read in advantage_stage(AlgorithmConfig(**keys)).reads)[2:]

    for name in ESTIMATORS:
        assert fields(adv_estimator=name) == ((FED[name],) if name in FED else ())
    assert fields(**REJECTS) == ("correction",)
    assert fields(**REJECTS, bypass_mode=True) == ()
    assert fields(adv_estimator="gae", use_kl_in_reward=True) == ("values", "kl_penalty")
    assert fields(rollout_is="token") == ()
    assert fields(adv_estimator="optimal_token_baseline", rollout_is="token") == ("old_log_probs", "correction")


@heavy
def test_a_group_whose_greedy_response_failed_trains_nothing() -> None:
    responses, rewards = random_step(groups=2)
    columns = {"reward_baselines": torch.tensor([0.5, 0.0]), "baseline_kept": torch.tensor([True, False])}
    baselines = Batch([0, 1], columns)
    result = estimated(options("remax"), responses, with_kept(rewards, [[1, 1, 0, 1], [1, 1, 1, 1]]), baselines)
    assert result["response_mask"].any(dim=1).tolist() == [True, True, False, True, False, False, False, False]
    # Without a score of the group's others, a single response still has its greedy one.
    lone = estimated(options("remax"), responses, with_kept(rewards, [[1, 0, 0, 0], [0] * 4]), baselines)
    assert lone["advantages"][0, 0].item() == pytest.approx(rewards["score"][0].item() - 0.5)


@heavy
def test_gdpo_normalises_each_reward_on_its_own() -> None:
    responses, rewards = random_step()
    right, short = [1.0, 0.0] * 12, [float(row % 3) for row in range(24)]
    listed = rewards.merge(rewards.like(right=right, short=short))
    made = rewards.merge(rewards.like(right=torch.tensor(right), short=torch.tensor(short)))  # by a stage

    def gained(given: Batch, keys: list[str], **more: Any) -> torch.Tensor:
        return estimated(options("gdpo", gdpo_reward_keys=keys, **more), responses, given)["advantages"]

    both, first = gained(listed, ["right", "short"]), gained(listed, ["right", "short"], gdpo_reward_weights=[1.0, 0.0])
    assert not torch.equal(both, first)
    assert (first[0::2, 0] > 0).all()
    assert (first[1::2, 0] < 0).all()
    assert torch.equal(gained(made, ["right", "short"]), both)
    assert torch.allclose(gained(made, ["score"]), gained(made, []), atol=1e-6)
    for given, keys, missing in (
        (rewards.merge(rewards.like(right=[None, *right[1:]])), ["right"], "1 of 24 samples have no number 'right'"),
        (rewards, ["form"], "24 of 24 samples have no number 'form'; let the reward function return"),
    ):
        with pytest.raises(DataError, match=missing):
            gained(given, keys)


@heavy
@pytest.mark.parametrize("keep", [None, [1, 1, 0, 1]], ids=["all", "one dropped"])
def test_nothing_learns_from_what_a_correction_rejects(keep: list[int] | None) -> None:
    responses, rewards = step([[1.0, 0.0, 0.0, 0.0]], [[2, 5, 1, 3]])
    mask = responses["response_mask"].clone()
    mask[0], mask[1, 4] = 0, 0  # a rejected response, and a rejected last token
    corrected = responses.like(old_log_probs=torch.zeros(4, R), response_mask=mask)
    if keep is None:  # the score of what was rejected counts in its group
        result = estimated(options(**REJECTS), responses, rewards, corrected)
        expected = torch.tensor([1.5, -0.5, -0.5, -0.5])[:, None] * mask
        torch.testing.assert_close(result["advantages"], expected, atol=1e-5, rtol=0)
        assert torch.equal(result["response_mask"], mask)
    # A critic reads the mask of the advantages: verl's value loss takes the mean over it.
    guessed = responses.like(values=torch.full((4, R), 0.25))
    scores = rewards if keep is None else with_kept(rewards, [keep])
    read = responses.merge(guessed, estimated(options("gae", **REJECTS), responses, scores, guessed, corrected))
    assert torch.equal(read["response_mask"], mask if keep is None else mask * torch.tensor(keep)[:, None])


@heavy
@pytest.mark.parametrize("name", ALONE)
def test_what_a_correction_rejects_as_a_whole_leaves_finite_advantages(name: str) -> None:
    responses, rewards = random_step(groups=2, n=4)
    for left in (0, 1, 12):
        mask = responses["response_mask"].clone()
        mask[: 4 if left > 1 else 8] = 0  # the first group, or all
        mask[-1, 0] = left > 0  # but one token
        corrected = responses.like(old_log_probs=torch.zeros(8, R), response_mask=mask)
        info = TaskInfo(step=1)
        result = estimated(options(name, **REJECTS), responses, rewards, corrected, task=info)
        for column in ("advantages", "returns"):
            assert torch.isfinite(result[column]).all()
            assert not result[column][mask == 0].any()
        assert left <= 1 or result["advantages"].any()
        assert all(np.isfinite(number) for number in info.metrics.values())


@heavy
@pytest.mark.parametrize("name", ALONE)
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
@pytest.mark.parametrize(("name", "lone"), [("grpo", False), ("reinforce_plus_plus", True)])
def test_a_lone_sample_has_no_baseline_but_where_it_is_compared_with_the_batch(name: str, lone: bool) -> None:
    responses, rewards = step([[0.9, 0.5, 0.1], [0.7, 0.0, 0.2]], [[2, 5, 1], [3, 2, 4]])
    task = TaskInfo(step=1)
    result = advantage(responses, with_kept(rewards, [[1, 1, 1], [1, 0, 0]]), algorithm=options(name), task=task)
    assert result["response_mask"].any(dim=1).tolist() == [True, True, True, lone, False, False]
    assert task.metrics["reward/dropped_samples"] == 3.0 - lone
    assert task.metrics["reward/dropped_groups"] == 1.0 - lone


@pytest.mark.parametrize("keep", [[0, 0, 0, 0], [0, 1, 0, 0]], ids=["none kept", "one kept"])
def test_a_part_with_nothing_to_train_on_calls_no_estimator(keep: list[int]) -> None:
    responses, rewards = step([[1.0, 0.0, 0.0, 0.0]], [[2, 5, 1, 3]])
    task = TaskInfo(step=1)
    result = advantage(responses, with_kept(rewards, [keep]), algorithm=options(), task=task)
    for column in ("advantages", "returns", "response_mask"):
        assert result[column].shape == (4, R)
        assert not result[column].any()
    assert without_tokens(task) == {"reward/dropped_samples": 4.0, "reward/dropped_groups": 1.0}


@heavy
@pytest.mark.parametrize("name", ["grpo", "gae"])
def test_the_metrics_of_a_step_in_parts_are_those_of_the_whole_step(name: str) -> None:
    draw, (responses, rewards) = np.random.default_rng(1), random_step()
    sources = [("minerva", "openai/gsm8k", "maxwell")[row % 3] for row in range(len(responses))]
    responses = responses.merge(responses.like(data_source=sources))
    # Parts keep between none and all of their samples.
    keep = (draw.random((6, 4)) < np.array([[1.0], [0.3], [0.0], [0.9], [0.6], [0.4]])).astype(int).tolist()
    fields, algorithm = [with_kept(rewards, keep), *feed(name, responses)], options(name, whiten="mini-batch")

    def logged(count: int) -> dict[str, float]:
        numbers: dict[str, list[float]] = {}
        for i, part in enumerate(responses.split(count)):
            task = TaskInfo(step=1, part=i, parts=count)
            estimated(algorithm, part, *(each.select(part.ids) for each in fields), task=task)
            for metric, value in pickle.loads(pickle.dumps(task.metrics)).items():
                numbers.setdefault(metric, []).append(value)
        found = {metric: of_step(metric, values) for metric, values in numbers.items()}
        found.pop("critic/vf_explained_var", None)  # the mean of those of the parts
        return found

    whole = logged(1)
    for parts in (2, 6):
        assert logged(parts) == pytest.approx(whole, abs=1e-5)
    kept = np.array(keep, dtype=bool).ravel()
    if name == "grpo":
        kept &= np.repeat(np.array(keep).sum(axis=1) >= 2, 4)
    scores = rewards["score"].numpy()
    assert whole["critic/score/mean"] == pytest.approx(scores[kept].mean())
    assert whole["critic/score/minerva/mean"] == pytest.approx(scores[kept & (np.arange(24) % 3 == 0)].mean())
    assert whole["reward/dropped_samples"] > 0


@heavy
@pytest.mark.parametrize("name", ALONE)
def test_equal_scores_teach_nothing_alone_or_beside_others(name: str) -> None:
    lengths = [[1 + (row + group) % R for row in range(8)] for group in range(2)]
    others = [0.0, 1.0, 0.5, 0.0, 0.75, 0.0, 0.25, 0.5]
    for score in (0.1, -100.1):
        responses, rewards = step([[score] * 8] * 2, lengths)
        for by_std in (True, False):
            algorithm = options(name, norm_adv_by_std_in_grpo=by_std)
            assert not advantage(responses, rewards, algorithm=algorithm, task=TaskInfo(step=1))["advantages"].any()
        responses, rewards = step([[score] * 8, others], lengths)
        result = advantage(responses, rewards, algorithm=options(name), task=TaskInfo(step=1))
        assert result["advantages"][8:].any()
        whitens = ESTIMATORS[name].whole_batch is not None and name != "gpg"
        assert whitens or not result["advantages"][:8].any()
        assert whitens or not result["returns"][:8].any()


# Numbers from which no finite advantage follows are refused, with their sample.


def test_the_first_number_that_counts_is_named() -> None:
    batch, _ = step([[0.0, 0.0], [0.0, 0.0]], [[1, 2], [3, 3]])
    task, values, mask = TaskInfo(step=2, stage="advantage"), torch.zeros(4, R), batch["response_mask"]
    values[0, 1] = math.nan  # behind the end of the first response
    values[3, 0] = -math.inf
    with pytest.raises(DataError, match=r"^advantage\[2\]: the value of sample 1 of group 1 is -inf; it must be a fin"):
        check_finite(values, "the value", batch, task, counts=mask)
    values[3, 0] = 3e38
    check_finite(values, "the value", batch, task, counts=mask)
    with pytest.raises(DataError, match=r"of sample 0 of group 0 is nan; it must be a finite number\.$"):
        check_finite(values, "the value", batch, task)


@heavy
@pytest.mark.parametrize("score", [math.nan, math.inf, 2 * LARGEST_SCORE])
def test_a_score_of_a_stage_of_ones_own_is_refused(score: float) -> None:
    batch, rewards = step([[0.0, 1.0], [0.0, score]], [[1, 2], [3, 3]])
    task = TaskInfo(step=1, stage="advantage")
    with pytest.raises(DataError, match=r"^advantage\[1\]: the score of sample 1 of group 1 is "):
        advantage(batch, rewards, algorithm=AlgorithmConfig(), task=task)
    values = batch.like(values=torch.full((4, R), math.nan))
    with pytest.raises(DataError, match=r"^advantage\[1\]: the critic's value of sample 0 of group 0 is nan"):
        estimated(options("gae"), batch, rewards.like(score=torch.ones(4)), values, task=task)
    kept = rewards.merge(rewards.like(kept=torch.tensor([True, True, False, False])))
    assert advantage(batch, kept, algorithm=AlgorithmConfig(), task=task)["advantages"].isfinite().all()


@heavy
@pytest.mark.parametrize("name", ALONE)
def test_the_advantages_of_the_largest_scores_are_finite_and_teach(name: str) -> None:
    """The largest score is chosen such that no square overflows, by which all advantages would become 0 or NaN."""
    batch, rewards = step([[LARGEST_SCORE, -LARGEST_SCORE]] * 4, [[5000, 5000]] * 4, room=5000)
    found = advantage(batch, rewards, algorithm=AlgorithmConfig(adv_estimator=name), task=TaskInfo(step=1))
    assert found["advantages"].isfinite().all()
    assert found["advantages"].abs().max() > 0.1
