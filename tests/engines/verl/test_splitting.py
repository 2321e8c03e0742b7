"""Splitting a step: parts in order give the weights of the whole step, bit for bit, for every estimator and loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dataflow.algorithms import ESTIMATORS, LOSSES
from dataflow.batch import Batch
from dataflow.graph import TaskInfo
from dataflow.stages.advantage import advantage_stage
from dataflow.stages.log_prob import old_log_prob, rollout_correction
from tests.engines.verl.models import Fresh, responses

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

GROUPS = 4
CORRECTION = {"rollout_is": "token", "rollout_is_batch_normalize": True, "rollout_rs": "token_k2"}
CASES: dict[str, dict[str, Any]] = {
    **{f"estimator {name}": {"adv_estimator": name} for name, found in ESTIMATORS.items() if not found.whole_batch},
    **{f"loss {name}": {"policy_loss": name, "dro_beta": 0.5} for name in LOSSES},
    "bypass": {"bypass_mode": True},
    "correction": {**CORRECTION, "rollout_rs_threshold": "0.01"},
    "kl in reward": {"use_kl_in_reward": True},
}


def samples() -> Batch:
    """Random responses with what the estimators may need."""
    batch, draw = responses(2 * GROUPS), torch.Generator().manual_seed(2)
    mask = batch["response_mask"]
    columns = {
        "score": torch.rand(len(batch), generator=draw),
        "noise": 0.3 * torch.randn(mask.shape, generator=draw) * mask,
        "kl_penalty": 0.1 * torch.rand(mask.shape, generator=draw) * mask,
        "reward_baselines": torch.rand(len(batch), generator=draw),
    }
    return batch.merge(batch.like(**columns))


def weights(fresh: Fresh, parts: int, options: dict[str, Any]) -> str:
    """Returns the digest of the weights after two steps of four updates, with advantages for each part alone."""
    trainer = fresh(8, **options)
    algorithm = trainer.algorithm
    stage = advantage_stage(algorithm)
    for step in (1, 2):
        data = samples()
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
    return str(trainer.digest())


@pytest.mark.parametrize("name", CASES)
def test_parts_in_order_give_the_weights_of_the_whole_step(name: str, fresh: Fresh) -> None:
    assert weights(fresh, 1, CASES[name]) == weights(fresh, 4, CASES[name])
