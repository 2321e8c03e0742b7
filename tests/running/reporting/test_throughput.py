"""Metrics that verl names: equal to what verl's own functions compute from the same batch, also over parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.run import RunConfig, parse_overrides
from dataflow.graph import TaskInfo
from dataflow.metrics import of_step
from dataflow.running.reporting.throughput import throughput
from dataflow.stages.advantage import advantage

heavy = pytest.mark.heavy
P, R, GROUPS, N = 6, 5, 4, 3
SECONDS = {"gen": 4.0, "old_log_prob": 0.5, "ref": 0.75, "adv": 0.25, "update_actor": 2.0, "reward": 3.0, "step": 8.0}


def a_step() -> tuple[Batch, Batch]:
    draw = torch.Generator().manual_seed(1)
    rows = GROUPS * N
    prompt = torch.randint(1, P + 1, (rows, 1), generator=draw)
    answer = torch.randint(1, R + 1, (rows, 1), generator=draw)
    at = torch.arange(P + R)
    whole = ((at >= P - prompt) & (at < P + answer)).long()
    ids = torch.randint(3, 50, (rows, P + R), generator=draw) * whole
    groups = [row // N for row in range(rows)]
    responses = Batch(
        groups,
        {
            "prompts": ids[:, :P],
            "responses": ids[:, P:],
            "attention_mask": whole,
            "response_mask": whole[:, P:],
            "response_text": ["so"] * rows,
        },
        {},
    )
    return responses, Batch(groups, {"score": torch.rand(rows, generator=draw)}, {})


def logged(parts: int) -> dict[str, float]:
    """Returns the metrics that a step of that many parts logs, with its times."""
    responses, rewards = a_step()
    numbers: dict[str, list[float]] = {}
    for part, groups in enumerate(np.split(np.arange(GROUPS), parts)):
        task = TaskInfo(step=1, part=part, parts=parts)
        mine = [int(group) for group in groups]
        advantage(responses.select(mine), rewards.select(mine), algorithm=AlgorithmConfig(), task=task)
        for name, value in task.metrics.items():
            numbers.setdefault(name, []).append(value)
    return {name: of_step(name, values) for name, values in numbers.items()} | {
        f"timing_s/{name}": seconds for name, seconds in SECONDS.items()
    }


@heavy
@pytest.mark.timeout(240)
@pytest.mark.parametrize("parts", [1, 2])
def test_tokens_and_times_are_verls(parts: int) -> None:
    from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics

    data = a_step()[0].to_dataproto()
    data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(dim=1).tolist()
    expected = compute_timing_metrics(data, SECONDS) | compute_throughout_metrics(data, SECONDS, 4)
    metrics = logged(parts)
    found = metrics | throughput(metrics, 4)
    assert set(expected) <= set(found)
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert set(throughput(metrics, 4)) <= set(expected)
    assert {"timing_per_token_ms/gen", "perf/throughput", "perf/time_per_step", "timing_s/step"} <= set(expected)


@heavy
@pytest.mark.timeout(240)
@pytest.mark.parametrize("parts", [1, 2])
def test_scores_and_lengths_are_verls(parts: int) -> None:
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    responses, rewards = a_step()
    data = responses.merge(rewards).to_dataproto()
    last = data.batch["response_mask"].sum(dim=1) - 1
    scores = torch.zeros(data.batch["response_mask"].shape)
    scores[torch.arange(len(last)), last] = data.batch["score"]
    columns = advantage(responses, rewards, algorithm=AlgorithmConfig(), task=TaskInfo(step=1))
    for name, values in {
        "token_level_scores": scores,
        "token_level_rewards": scores,
        "advantages": columns["advantages"],
        "returns": columns["returns"],
    }.items():
        data.batch[name] = values
    # Here none is cut, though one is as long as the longest.
    expected = compute_data_metrics(data, use_critic=False) | {"prompt_length/clip_ratio": 0.0}
    found = logged(parts)
    assert set(expected) <= set(found)
    # The mean over the parts of a mean over tokens is not that over the step's tokens.
    by_token = {"critic/advantages/mean", "critic/returns/mean"} if parts > 1 else set()
    names = set(expected) - by_token
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, abs=1e-6)
    assert {"critic/score/mean", "prompt_length/mean", "response_length/clip_ratio"} <= names


def test_a_step_that_counts_no_tokens_has_none() -> None:
    assert throughput({"timing_s/step": 1.0}, 1) == {}
    assert throughput({"timing_s/step": 0.0, "perf/total_num_tokens": 5.0, "perf/response_tokens": 2.0}, 1) == {}


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ([], 1),
        (["trainer.world_size=4", "engine.replicas=2"], 4),
        (["trainer.world_size=4", "engine.replicas=2", "engine.tensor_parallel=2", "placement=disaggregated"], 8),
        (["trainer.world_size=4", "reward.models={rm: {path: x, replicas: 2}}"], 6),
        (["trainer.world_size=4", "reward.models={rm: {path: x, placement: colocated}}"], 4),
        (["reward.models={rm: {url: 'http://h'}}"], 1),
    ],
)
def test_the_gpus_of_a_run(overrides: list[str], gpus: int) -> None:
    assert parse_overrides(RunConfig, overrides).gpus == gpus
