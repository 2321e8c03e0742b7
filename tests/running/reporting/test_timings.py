"""Times and tokens of a step: verl's names, and what verl's own functions compute, also over parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.run import RunConfig, parse_overrides
from dataflow.graph import TaskInfo
from dataflow.metrics import of_step
from dataflow.planning.workload import Validation, grpo
from dataflow.running.reporting.timings import step_metrics, throughput
from dataflow.stages.advantage import advantage
from dataflow.timeline.causes import exposed_waits
from dataflow.timeline.spans import Span, Trace

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


@pytest.mark.heavy
@pytest.mark.timeout(240)
@pytest.mark.parametrize("parts", [1, 2])
def test_numbers_under_verls_names_are_verls(parts: int) -> None:
    from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_throughout_metrics, compute_timing_metrics

    responses, rewards = a_step()
    data = responses.merge(rewards).to_dataproto()
    data.meta_info["global_token_num"] = data.batch["attention_mask"].sum(dim=1).tolist()
    scores = torch.zeros(data.batch["response_mask"].shape)
    scores[torch.arange(len(scores)), data.batch["response_mask"].sum(dim=1) - 1] = data.batch["score"]
    columns = advantage(responses, rewards, algorithm=AlgorithmConfig(), task=TaskInfo(step=1))
    data.batch["token_level_scores"] = data.batch["token_level_rewards"] = scores
    data.batch["advantages"], data.batch["returns"] = columns["advantages"], columns["returns"]
    timing = compute_timing_metrics(data, SECONDS) | compute_throughout_metrics(data, SECONDS, 4)
    # Here none is cut, though one is as long as the longest.
    expected = timing | compute_data_metrics(data, use_critic=False) | {"prompt_length/clip_ratio": 0.0}
    metrics = logged(parts)
    own = throughput(metrics, 4)
    assert set(own) <= set(timing)
    found = metrics | own
    assert set(expected) <= set(found)
    # The mean over the parts of a mean over tokens is not that over the step's tokens.
    by_token = {"critic/advantages/mean", "critic/returns/mean"} if parts > 1 else set()
    names = set(expected) - by_token
    assert {name: found[name] for name in names} == pytest.approx({name: expected[name] for name in names}, abs=1e-6)
    assert {"critic/score/mean", "prompt_length/mean", "timing_per_token_ms/gen", "perf/throughput"} <= names


def run() -> Trace:
    """Two steps on-policy in two parts, with a write to disk at the end of the first."""
    trace = Trace(meta={"job": {"pipeline": grpo(validation=Validation(every=1)).facts()}})
    at = 1.0
    for step in (1, 2):
        trace.add(
            Span("rollout", step, 0, 1, "gpu", at, at + 2),
            Span("reward_collect", step, 0, 2, "reward", at + 2, at + 4, {}, f"rollout[{step}]"),
            Span("reward_collect", step, 1, 2, "reward", at + 2, at + 6.5, {}, f"rollout[{step}]"),
            Span("old_log_prob", step, 0, 1, "gpu", at + 2, at + 3),
            Span("ref_log_prob", step, 0, 1, "gpu", at + 3, at + 3.5),
            Span("advantage", step, 0, 2, "controller", at + 4, at + 4.25, {}, f"reward_collect[{step}.1]"),
            Span("advantage", step, 1, 2, "controller", at + 6.5, at + 6.75, {}, f"reward_collect[{step}.2]"),
            Span("actor_update", step, 0, 2, "gpu", at + 4.25, at + 5.25, {}, f"advantage[{step}.1]"),
            Span("actor_update", step, 1, 2, "gpu", at + 6.75, at + 7.75, {}, f"advantage[{step}.2]"),
            Span("sync_weights", step, 0, 1, "gpu", at + 7.75, at + 8, {}, f"actor_update[{step}.2]"),
        )
        if step == 1:
            trace.add(
                Span("save", 1, 0, 1, "io", at + 8, at + 8.5, {}, "sync_weights[1]"),
                Span("load", 1, 0, 1, "io", 0, 1),
                Span("val_rollout", 1, 0, 1, "gpu", at + 8, at + 8.25, {"optional": True}),
            )
        at += 8.5
    return trace


def test_a_steps_timings_go_by_verls_names() -> None:
    assert step_metrics(run(), 2) == {
        "timing_s/gen": 2,
        "timing_s/reward_collect": 4.5,
        "timing_s/old_log_prob": 1,
        "timing_s/ref": 0.5,
        "timing_s/adv": 0.5,
        "timing_s/update_actor": 2,
        "timing_s/sync_weights": 0.25,
        "timing_s/reward": 0.5 + 1.25,
        "timing_s/step": 8,
        "overlap/exposed_wait_s": 2.25,
        "overlap/gpu_busy_frac": 1 - 2.25 / 8,
    }


def test_steps_tile_the_run() -> None:
    trace = run()
    both = [step_metrics(trace, step) for step in (1, 2)]
    assert sum(m["timing_s/step"] for m in both) == trace.wall
    waited = sum(w.end - w.begin for w in exposed_waits(trace))
    assert sum(m["overlap/exposed_wait_s"] for m in both) == waited


def test_no_stage_hides_the_time_of_another_whatever_they_are_called() -> None:
    def stage(name: str, role: str | None = None) -> dict[str, Any]:
        return {"name": name, "on": "gpu", "reads": [], "writes": [], "role": role}

    stages = [stage("draw", "samples"), stage("again", "samples"), stage("train", "trains"), stage("more", "trains")]
    stages += [stage("update_actor", "syncs"), stage("step"), stage("gen"), stage("reward/mine"), stage("save")]
    trace = Trace(meta={"job": {"pipeline": {"stages": stages, "inputs": []}}})
    for at, each in enumerate(stages):
        trace.add(Span(each["name"], 1, 0, 1, "gpu", float(at), at + 0.5))
    assert {name: value for name, value in step_metrics(trace, 1).items() if name.startswith("timing_s/")} == {
        "timing_s/gen": 1.0,
        "timing_s/update_actor": 1.0,
        "timing_s/stage/update_actor": 0.5,
        "timing_s/stage/step": 0.5,
        "timing_s/stage/gen": 0.5,
        "timing_s/stage/reward/mine": 0.5,
        "timing_s/save": 0.5,
        "timing_s/reward": 0.0,
        "timing_s/step": 8.5,
    }


@pytest.mark.parametrize(
    ("overrides", "gpus"),
    [
        ([], 1),
        (["trainer.world_size=4", "engine.replicas=2", "engine.tensor_parallel=2", "placement=disaggregated"], 8),
        (["trainer.world_size=4", "reward.models={rm: {path: x, replicas: 2}}"], 6),
        (["reward.models={rm: {url: 'http://h'}}"], 1),
    ],
)
def test_the_gpus_of_a_run(overrides: list[str], gpus: int) -> None:
    assert parse_overrides(RunConfig, overrides).gpus == gpus
