"""Defaults of the recipes' own models, of a million weights: what trains them would ruin a real one."""

from __future__ import annotations

from dataflow.config.critic import CriticConfig
from dataflow.config.run import TrainerConfig


def toy_trainer() -> TrainerConfig:
    """Returns section ``trainer`` for the tiny model."""
    return TrainerConfig(lr=2e-4, betas=(0.9, 0.99), weight_decay=0.0, warmup_steps=5)


def toy_critic() -> CriticConfig:
    """Returns section ``critic`` for the tiny model."""
    return CriticConfig(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
