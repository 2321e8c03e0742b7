"""KL in the reward with an adaptive coefficient, beside a critic: one step of PPO on services that only count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow import Carried, Hosted, Latest, Pipeline, run, stage
from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig, KlControlConfig
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.critic import critic_update, values
from dataflow.stages.log_prob import log_prob_stages
from dataflow.stages.update import actor_update

GROUPS, N, R, STEPS = 4, 2, 3, 4
KL = KlControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=20)
ALGORITHM = AlgorithmConfig(preset="ppo", whiten="mini-batch", use_kl_in_reward=True, kl_ctrl=KL)


class Actor:
    """Its log-probs drift away from the reference's with each update, by the advantages that it sees."""

    def __init__(self) -> None:
        self.drift = 0.3

    def old_log_probs(self, batch: Batch) -> Batch:
        return batch.like(old_log_probs=self.drift - 0.1 * batch["responses"])

    def ref_log_probs(self, batch: Batch) -> Batch:
        return batch.like(ref_log_prob=-0.1 * batch["responses"])

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        self.drift += 0.05 * float((batch["advantages"] * batch["responses"]).mean())
        return {"actor/drift": self.drift}


class Critic:
    """Expects the same of every token, and moves towards the returns."""

    def __init__(self) -> None:
        self.expected = 0.0

    def values(self, batch: Batch) -> Batch:
        return batch.like(values=torch.full((len(batch), R), self.expected))

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        self.expected += 0.2 * (float(batch["returns"].mean()) - self.expected)
        return {"critic/expected": self.expected}


@stage(writes="responses", on="gpu", role="samples")
def rollout(prompts: int, version: Carried) -> Batch:
    draw = torch.Generator().manual_seed(prompts)
    tokens = torch.randint(0, 9, (GROUPS * N, R), generator=draw)
    ones = torch.ones_like(tokens)
    found = {"prompts": ones, "responses": tokens, "response_mask": ones, "attention_mask": torch.cat([ones, ones], 1)}
    return Batch([g for g in range(GROUPS) for _ in range(N)], found, {"weights_version": version or 0})


@stage(writes="rewards", on="reward", role="collects")
def collect(responses: Batch, *, task: Any) -> Batch:
    take = task.take or GROUPS
    part = responses.select(sorted(responses.ids)[task.part * take : (task.part + 1) * take])
    return part.like(score=part["responses"].float().mean(dim=1) / 8)


@stage(writes="version", on="gpu", role="syncs")
def sync(actor: Latest, *, task: Any) -> int:
    return int(task.step)


def rows(policy: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Returns the metrics of each step of a run of PPO."""
    trainer, critic = Hosted("trainer", Actor), Hosted("critic", Critic)
    stages = [
        rollout,
        *log_prob_stages(ALGORITHM, trainer=trainer),
        values.bind(value_model=critic),
        collect,
        advantage_stage(ALGORITHM),
        actor_update.bind(trainer=trainer, groups=GROUPS, whiten=True),
        critic_update.bind(value_model=critic, groups=GROUPS),
        sync,
    ]
    keys = {"groups": GROUPS, "mini_batches": 2, "steps": STEPS, "checkpoint.every": 0, "runs": tmp_path}
    options = [f"{key}={value}" for key, value in {**keys, "policy": policy, "policy.order": "index"}.items()]
    done = run(Pipeline(stages, inputs=["prompts"]), *options, inputs={"prompts": lambda step: step})
    return [row for row in done.metrics if "actor/drift" in row]


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_the_coefficient_is_one_a_step_and_the_same_however_a_policy_splits(tmp_path: Path) -> None:
    found = {policy: rows(policy, tmp_path) for policy in ("baseline", "mini-batch", "off-policy", "both")}
    names = ["actor/reward_kl_penalty_coeff", "actor/reward_kl_penalty", "actor/drift", "critic/expected"]
    picked = {policy: [[row[name] for name in names] for row in each] for policy, each in found.items()}
    assert picked["baseline"] == picked["mini-batch"]
    assert picked["off-policy"] == picked["both"]
    assert len(picked["both"]) == STEPS
    expected = KL.kl_coef
    for coefficient, kl, _drift, _expected in picked["both"]:
        assert coefficient == pytest.approx(expected)
        off = max(-0.2, min(0.2, kl / KL.target_kl - 1))
        expected *= 1 + off * GROUPS * N / KL.horizon
    assert len({row[0] for row in picked["both"]}) == STEPS, "it moves at each step"
    assert len({row[3] for row in picked["both"]}) == STEPS, "the critic learns from the penalised rewards"
