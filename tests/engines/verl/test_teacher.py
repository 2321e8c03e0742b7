"""The teacher scores the tokens of a batch as the trainer does, and never changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dataflow.config.run import TrainerConfig
from dataflow.engines.verl.teacher import VerlTeacher
from tests.engines.verl.test_trainer import Make, make, responses

__all__ = ["make"]  # a fixture

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]


def test_it_scores_as_the_trainer_does_with_the_same_weights(make: Make, tiny_qwen: Path) -> None:
    batch = responses(6)
    trainer = make(tiny_qwen)
    expected = trainer.old_log_probs(batch)["old_log_probs"]
    trainer.close()
    teacher = VerlTeacher(str(tiny_qwen), TrainerConfig(micro_batch_size=4))
    before = teacher.digest()
    found = teacher.log_probs(batch)
    assert found.ids == batch.ids
    assert torch.allclose(found["teacher_log_probs"], expected, atol=1e-5)
    assert torch.equal(teacher.log_probs(batch)["teacher_log_probs"], found["teacher_log_probs"])
    assert teacher.digest() == before
    teacher.close()
