"""Log-probs: the stages that an algorithm needs, the correction of the rollout, and the KL in the reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow import Carried, Hosted, Latest, Pipeline, run, stage
from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig, KlControlConfig
from dataflow.graph import TaskInfo
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.critic import critic_update, values
from dataflow.stages.log_prob import kl_penalty, log_prob_stages, rollout_correction
from dataflow.stages.update import actor_update


def names(**keys: Any) -> list[str]:
    return [stage.name for stage in log_prob_stages(AlgorithmConfig(**keys), trainer=None)]


def test_the_stages_that_an_algorithm_needs() -> None:
    own = ["old_log_prob", "rollout_correction"]
    assert names() == own
    assert names(bypass_mode=True) == []
    assert names(use_kl_loss=True) == [*own, "ref_log_prob"]
    assert names(use_kl_in_reward=True) == [*own, "ref_log_prob", "kl_penalty"]
    assert names(use_kl_in_reward=True, bypass_mode=True) == ["ref_log_prob", "kl_penalty"]
    penalty = log_prob_stages(AlgorithmConfig(use_kl_in_reward=True, bypass_mode=True), trainer=None)[-1]
    assert [read.field for read in penalty.reads] == ["responses", "responses", "ref_log_probs", "kl_coef"]
    # Stages wait for a correction, but not for metrics alone.
    for keys, writes, on in (
        ({}, (), "io"),
        ({"rollout_is": "token"}, ("correction",), "controller"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "0.1"}, ("correction",), "controller"),
    ):
        correction = log_prob_stages(AlgorithmConfig(**keys), trainer=None)[1]  # type: ignore[arg-type]
        assert (correction.writes, correction.on) == (writes, on)


@pytest.mark.heavy
def test_k1_bounds_the_inverse_of_the_ratio_that_weighs_as_in_verl() -> None:
    """The first token is twice as likely for the trainer, the second half as likely, the third just the same."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    ratio, mask = torch.tensor([[2.0, 0.5, 1.0]]), torch.ones(1, 3, dtype=torch.long)
    responses = Batch([0], {"response_mask": mask, "rollout_log_probs": torch.zeros(1, 3)}, {"weights_version": 0})
    keys = {"rollout_is": "token", "rollout_is_threshold": 5.0, "rollout_rs": "token_k1"}
    algorithm, old = AlgorithmConfig(**keys, rollout_rs_threshold="0.4_1.5"), responses.like(old_log_probs=ratio.log())
    found = rollout_correction(responses, old, algorithm=algorithm, task=TaskInfo(step=1))
    # A bound on the weights would reject the first one; that on rollout / trainer rejects the second.
    kept, _metrics = compute_rollout_rejection_mask(
        log_ratio=ratio.log(), response_mask=mask, rollout_rs="token_k1", rollout_rs_threshold="0.4_1.5"
    )
    assert found["response_mask"].tolist() == kept.tolist() == [[1, 0, 1]]
    assert found["rollout_is_weights"][found["response_mask"] == 1].tolist() == pytest.approx([2.0, 1.0])


@pytest.mark.heavy
def test_an_adaptive_coefficient_follows_the_target() -> None:
    mask = torch.ones(4, 3, dtype=torch.long)
    responses = Batch([0, 0, 1, 1], {"response_mask": mask})
    old = responses.like(old_log_probs=torch.full((4, 3), -1.0), response_mask=torch.zeros_like(mask))
    control = {"type": "adaptive", "kl_coef": 0.5, "target_kl": 0.1, "horizon": 10}
    algorithm = AlgorithmConfig(use_kl_in_reward=True, kl_ctrl=control)  # type: ignore[arg-type]
    coefficient, seen = None, []
    for distance in (0.4, 0.4, 0.0):
        reference = responses.like(ref_log_prob=torch.full((4, 3), -1.0 - distance))
        task = TaskInfo(step=1)
        penalty, coefficient = kl_penalty(responses, old, reference, coefficient, algorithm=algorithm, task=task)
        # The mask of a correction does not count, as verl applies it afterwards.
        used = task.metrics["actor/reward_kl_penalty_coeff"]
        torch.testing.assert_close(penalty["kl_penalty"], torch.full((4, 3), used * distance))
        seen.append(used)
    # Off by more than 20%, each step of 4 samples changes it by 0.2 x 4 / 10.
    assert [*seen, coefficient] == pytest.approx([0.5, 0.54, 0.5832, 0.536544])


# KL in the reward beside a critic: steps of PPO on services that only count.

GROUPS, N, R, STEPS = 4, 2, 3, 4
KL = KlControlConfig(type="adaptive", kl_coef=0.5, target_kl=0.1, horizon=20)
ALGORITHM = AlgorithmConfig(preset="ppo", whiten="mini-batch", use_kl_in_reward=True, kl_ctrl=KL)


class Actor:
    """Its log-probs drift away from the reference's with each update, by the advantages that it sees."""

    drift = 0.3

    def old_log_probs(self, batch: Batch) -> Batch:
        return batch.like(old_log_probs=self.drift - 0.1 * batch["responses"])

    def ref_log_probs(self, batch: Batch) -> Batch:
        return batch.like(ref_log_prob=-0.1 * batch["responses"])

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        self.drift += 0.05 * float((batch["advantages"] * batch["responses"]).mean())
        return {"actor/drift": self.drift}


class Critic:
    """Expects the same of every token, and moves towards the returns."""

    expected = 0.0

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


@pytest.mark.heavy
@pytest.mark.timeout(120)
def test_the_coefficient_is_one_a_step_and_the_same_however_a_policy_splits(tmp_path: Path) -> None:
    def rows(policy: str) -> list[list[float]]:
        trainer, critic = Hosted("trainer", Actor), Hosted("critic", Critic)
        stages = [
            rollout, *log_prob_stages(ALGORITHM, trainer=trainer), values.bind(value_model=critic), collect,
            advantage_stage(ALGORITHM), actor_update.bind(trainer=trainer, groups=GROUPS, whiten=True),
            critic_update.bind(value_model=critic, groups=GROUPS), sync,
        ]  # fmt: skip
        keys = {"groups": GROUPS, "mini_batches": 2, "steps": STEPS, "checkpoint.every": 0, "runs": tmp_path}
        options = [f"{key}={value}" for key, value in {**keys, "policy": policy, "policy.order": "index"}.items()]
        done = run(Pipeline(stages, inputs=["prompts"]), *options, inputs={"prompts": lambda step: step})
        shown = ("actor/reward_kl_penalty_coeff", "actor/reward_kl_penalty", "actor/drift", "critic/expected")
        return [[row[name] for name in shown] for row in done.metrics if "actor/drift" in row]

    assert rows("baseline") == rows("mini-batch")
    both, expected = rows("both"), KL.kl_coef
    assert rows("off-policy") == both
    for coefficient, kl, _drift, _expected in both:
        assert coefficient == pytest.approx(expected)
        expected *= 1 + max(-0.2, min(0.2, kl / KL.target_kl - 1)) * GROUPS * N / KL.horizon
    for column in (0, 3):  # the coefficient moves at each step, and the critic learns from the penalised rewards
        assert len({row[column] for row in both}) == STEPS
