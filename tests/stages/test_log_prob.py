"""Log-probs: the stages that an algorithm needs, the correction of the rollout, and the KL in the reward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.graph import TaskInfo
from dataflow.stages.log_prob import kl_penalty, log_prob_stages, rollout_correction


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
