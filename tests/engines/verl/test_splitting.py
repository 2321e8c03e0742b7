"""Splitting a step: parts in order give the weights of the whole step, bit for bit, for every estimator and loss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.algorithms.estimators import ESTIMATORS
from dataflow.algorithms.losses import LOSSES
from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.run import TrainerConfig
from dataflow.engines.verl.trainer import VerlTrainer
from dataflow.graph import TaskInfo
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.log_prob import old_log_prob, rollout_correction

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

GROUPS, N, P, R = 4, 2, 5, 6
CORRECTION = {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "token_k2"}
CASES: dict[str, dict[str, Any]] = {
    **{f"estimator {name}": {"adv_estimator": name} for name, found in ESTIMATORS.items() if not found.whole_batch},
    **{f"loss {name}": {"policy_loss": name, "dro_beta": 0.5} for name in LOSSES},
    "bypass": {"bypass_mode": True},
    "correction": {**CORRECTION, "rollout_rs_threshold": "0.01"},
    "kl in reward": {"use_kl_in_reward": True},
}


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Leaves the environment of this process as it was."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def responses() -> Batch:
    """Random responses of 1 to R tokens, with what the estimators may need."""
    draw = torch.Generator().manual_seed(2)
    rows = GROUPS * N
    mask = (torch.arange(R) < torch.randint(1, R + 1, (rows, 1), generator=draw)).long()
    whole = torch.cat([torch.ones(rows, P, dtype=torch.long), mask], dim=1)
    ids = torch.randint(3, 250, (rows, P + R), generator=draw) * whole
    return Batch(
        [row // N for row in range(rows)],
        {
            "prompts": ids[:, :P],
            "responses": ids[:, P:],
            "input_ids": ids,
            "attention_mask": whole,
            "position_ids": torch.arange(P + R).expand(rows, -1).contiguous(),
            "response_mask": mask,
            "score": torch.rand(rows, generator=draw),
            "noise": 0.3 * torch.randn((rows, R), generator=draw) * mask,
            "kl_penalty": 0.1 * torch.rand((rows, R), generator=draw) * mask,
            "reward_baselines": torch.rand(rows, generator=draw),
        },
        {"weights_version": 0},
    )


def weights(model: Path, algorithm: AlgorithmConfig, parts: int) -> str:
    """Returns the digest of the weights after two steps of four updates, with advantages for each part alone."""
    trainer = VerlTrainer(
        str(model), TrainerConfig(lr=1e-2, micro_batch_size=8), algorithm, total_steps=2, response_length=R
    )
    try:
        stage = advantage_stage(algorithm)
        for step in (1, 2):
            data = responses()
            known = trainer.old_log_probs(data)["old_log_probs"]
            data = data.merge(data.like(rollout_log_probs=known + data["noise"]))
            if not algorithm.bypass_mode:
                scored = old_log_prob(data, None, trainer=trainer)
                corrected = rollout_correction(data, scored, algorithm=algorithm, task=TaskInfo(step=step))
                data = data.merge(scored, corrected)
            for part in data.split(parts):
                more = [part] * (len(stage.reads) - 2)
                found = stage(part, part.like(score=part["score"]), *more, algorithm=algorithm, task=TaskInfo(step))
                mini_batches = part.merge(found).split(GROUPS // parts)
                for at, mini_batch in enumerate(mini_batches):
                    trainer.update(mini_batch, last=at == len(mini_batches) - 1 and part.ids[-1] == GROUPS - 1)
        return trainer.digest()
    finally:
        trainer.close()


@pytest.mark.parametrize("name", CASES)
def test_parts_in_order_give_the_weights_of_the_whole_step(name: str, tiny_qwen: Path) -> None:
    algorithm = AlgorithmConfig(**CASES[name])
    assert weights(tiny_qwen, algorithm, parts=1) == weights(tiny_qwen, algorithm, parts=4)
