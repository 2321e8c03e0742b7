"""Several rollout engines as one: each group of prompts goes to the engine with the fewest samples to draw.

An engine that has as many samples as it decodes at once gets no more; further groups wait here, and each sample that
ends may let one go (:mod:`dataflow.engines.least_load`). So engines with short responses take over work from those with
long ones. One gate (:mod:`dataflow.engines.gate`) is before all engines, so a sample's version is exact whichever
engine draws it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.least_load import LeastLoad
from dataflow.engines.rollout import Request, Rollout
from dataflow.engines.samples import prompt_ids
from dataflow.errors import RunError

if TYPE_CHECKING:
    import torch


class Replicas(Rollout):
    """A :class:`~dataflow.engines.base.RolloutEngine` over several.

    A sample depends on its seed alone, so the samples equal those of a single engine. If an engine fails, all current
    and later calls raise :class:`ServiceLost`, and all engines have to be rebuilt.

    Args:
        engines: each a :class:`~dataflow.engines.base.RolloutEngine`, with the same model and weights.
        model, max_prompt_length, in_flight: see :class:`~dataflow.engines.rollout.Rollout`, as for errors.
        slots: samples that an engine decodes at once.
        share: turns weights into what the engines' ``sync`` takes, once for all.
        release: called when all engines are closed.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        model: str,
        max_prompt_length: int,
        slots: int,
        in_flight: Literal["wait", "abort"] = "wait",
        share: Callable[[Mapping[str, torch.Tensor]], Any] = dict,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(model, max_prompt_length, "a replica", True, in_flight)
        self._engines = list(engines)
        self._choice = LeastLoad(self._engines, slots)
        self._share, self._release = share, release

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncGenerator[Sample, None]:
        """See :meth:`RolloutEngine.generate`; yields the samples of a group once it has all of them.

        Closing the generator aborts its samples in all engines.
        """
        self._check(sampling)
        prompt_ids(prompts, self.max_prompt_length, self.vocabulary.size)  # checks them
        given = prompts.only("prompt_ids")
        works = [partial(self._group, given.select([group]), sampling, seed) for group in prompts.ids]
        async with aclosing(self._gate.draw_all(works)) as groups:
            async for group in groups:
                for sample in group:
                    yield sample

    async def _group(self, prompts: Batch, sampling: Sampling, seed: int) -> list[Sample]:
        """Returns the samples of one group."""
        engine = await self._choice.take((seed, prompts.ids[0]), samples=sampling.n)
        found: list[Sample] = []
        try:
            async with aclosing(engine.generate(prompts, sampling, seed)) as samples:
                async for sample in samples:
                    self._check_version(sample)
                    found.append(sample)
                    self._choice.give_back(engine)
        finally:
            self._choice.give_back(engine, sampling.n - len(found))
        if len(found) < sampling.n:
            raise RunError(f"{sampling.n - len(found)} samples of group {prompts.ids[0]} are missing")
        return found

    async def _draw(self, request: Request) -> Sample:
        engine = await self._choice.take(request.seed[:2])
        try:
            sample: Sample = await engine.sample(request.prompt, request.sampling, request.seed)
            self._check_version(sample)
            return sample
        finally:
            self._choice.give_back(engine)

    def _check_version(self, sample: Sample) -> None:
        if sample.version != self.version:
            raise RunError(f"a sample was drawn with version {sample.version} of the weights, not {self.version}")

    async def _shared(self, weights: Mapping[str, torch.Tensor], version: int) -> Any:
        return await asyncio.to_thread(self._share, weights)

    async def _load(self, weights: Any, version: int) -> None:
        await asyncio.gather(*(engine.sync(weights, version) for engine in self._engines))

    async def _free(self) -> None:
        await asyncio.gather(*(engine.sleep() for engine in self._engines))

    async def _allocate(self) -> None:
        await asyncio.gather(*(engine.wake() for engine in self._engines))

    def _lost(self, cause: Exception) -> str:
        return f"rollout: {cause}; the replicas have to be rebuilt."

    async def close(self) -> None:
        """Aborts the samples in flight and closes the engines. Idempotent."""
        self._gate.close()
        engines, self._engines = self._engines, []
        await asyncio.gather(*(engine.close() for engine in engines))
        self._release()
