"""A rank that trains on images; see ``tests.rigs.ranks``."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.run import TrainerConfig
from dataflow.engines.verl.trainer import VerlTrainer


def be_a_rank(out: str, port: str, _job: str, path: str) -> None:
    """Takes a step on the batch that lies beside the model; saves what it finds."""
    os.environ["MASTER_PORT"] = port
    batch = torch.load(Path(path) / "batch.pt", weights_only=False)
    length = batch["responses"].shape[1]
    options = TrainerConfig(micro_batch_size=1, lr=1e-3)
    trainer = VerlTrainer(str(Path(path) / "model"), options, AlgorithmConfig(), 10, length)
    old = trainer.old_log_probs(batch)
    advantages = torch.linspace(-1, 1, len(batch))[:, None].expand(-1, length)
    trainer.update(batch.merge(old, batch.like(advantages=advantages)), last=True)
    after = trainer.old_log_probs(batch)["old_log_probs"]
    torch.save([{"before": old["old_log_probs"], "after": after, "digest": trainer.digest()}], out)
    trainer.close()
