"""Rollout: prompts become groups of responses, sampled from the engine's copy of the actor weights."""

from __future__ import annotations

from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import RolloutEngine, Sampling
from dataflow.errors import RunError
from dataflow.graph import Carried, TaskInfo, stage

# Validation draws from streams of its own, whatever the step.
VALIDATION_SEED = 1 << 40


@stage(writes="responses", on="gpu", streams=True)
def rollout(
    prompts: Batch,
    weights: Carried,
    *,
    engine: RolloutEngine,
    sampling: Sampling,
    seed: int,
    task: TaskInfo,
) -> Batch:
    """Samples ``sampling.n`` responses per prompt with the weights the policy allows.

    Args:
        prompts: a row per prompt (``prompt_ids`` and what the reward needs).
        weights: version of the weights that the engine was last given; None before the first sync.
        engine: holds the weights.
        sampling: how to draw.
        seed: of the run; a sample's own stream follows from it, the step, the group and its place in the group.
        task: which step this is.

    Returns:
        What :meth:`RolloutEngine.generate` returns, ``meta["weights_version"]`` included.

    Raises:
        RunError: the engine holds another version than the graph says.
    """
    _check_version(engine, weights, task)
    responses = engine.generate(prompts, sampling, seed=(seed << 20) + task.step)
    task.log({"staleness/rollout": float(task.step - 1 - responses.meta["weights_version"])})
    return responses


@stage(writes="val_responses", on="gpu")
def val_rollout(
    val_prompts: Batch,
    weights: Any,
    *,
    engine: RolloutEngine,
    sampling: Sampling,
    seed: int,
    task: TaskInfo,
) -> Batch:
    """Answers the held-out prompts with the weights of this step."""
    _check_version(engine, weights, task)
    return engine.generate(val_prompts, sampling, seed=VALIDATION_SEED + seed)


def _check_version(engine: RolloutEngine, weights: Any, task: TaskInfo) -> None:
    if engine.version != (weights or 0):
        raise RunError(
            f"{task.stage}[{task.step}]: the engine holds weights version {engine.version}, "
            f"the graph says {weights or 0}; a sync was lost or came too early."
        )
