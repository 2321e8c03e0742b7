"""Reward models on the GPUs of trainer and engine: which of a run's models, and the stages that wake them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataflow.errors import ConfigError
from dataflow.rewards.models.sleeping import Sleeper
from dataflow.stage import Stage
from dataflow.stages.sampling.sleep import with_sleep


def sleepers_of(config: Any) -> list[Sleeper]:
    """Returns what wakes the reward models with ``placement=colocated``.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.

    Raises:
        ConfigError: such a model cannot sleep.
    """
    found = []
    for name, model in config.reward.models.items():
        if model.placement != "colocated":
            continue
        if model.engine == "vllm" and model.path is not None and not config.ray.gpus_per_worker:
            raise ConfigError(
                f"reward.models.{name}.placement=colocated: vLLM cannot sleep on a CPU; give placement=own, or "
                "engine=hf for a tiny classifier."
            )
        found.append(Sleeper(name, model.given_urls, model.start_timeout, config.run_file(flag_of(name))))
    return found


def flag_of(model: str) -> str:
    """Returns the name, in a run's directory, of the file that is there while a reward model sleeps."""
    return f"servers/{model}.asleep"


def colocated(config: Any, stages: Sequence[Stage]) -> list[Stage]:
    """Returns the stages of a run, with those that wake its colocated reward models and let them sleep, if it has any.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        stages: of the pipeline, validation included.

    Raises:
        ConfigError: a model cannot sleep, or nothing samples.
    """
    sleepers = sleepers_of(config)
    if not sleepers:
        return list(stages)
    pool = next((s.on for s in stages if s.role == "samples"), None)
    if pool is None:
        raise ConfigError(
            f"reward.models.{sleepers[0].model}.placement=colocated: this pipeline has no rollout whose GPUs the model "
            "could share; give placement=own."
        )
    return with_sleep(stages, pool, sleepers)
