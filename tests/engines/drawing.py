"""Draws samples from a rollout engine as a stage does, on an event loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from dataflow.batch import Batch
from dataflow.engines.base import RolloutEngine, Sample, Sampling

T = TypeVar("T")
DEADLINE_S = 60.0


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine that must end in time."""

    async def limited() -> T:
        async with asyncio.timeout(DEADLINE_S):
            return await work

    return asyncio.run(limited())


def draw(engine: RolloutEngine, prompts: Batch, sampling: Sampling, seed: int = 0) -> list[Sample]:
    """Returns all samples, in the order in which they ended."""

    async def all_of_them() -> list[Sample]:
        return [sample async for sample in engine.generate(prompts, sampling, seed)]

    return run(all_of_them())


def generate(engine: RolloutEngine, prompts: Batch, sampling: Sampling, seed: int = 0) -> Batch:
    """Returns the samples as a batch."""
    return engine.batch(prompts, draw(engine, prompts, sampling, seed), sampling.max_tokens)
