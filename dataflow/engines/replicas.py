"""Several rollout engines as one: each group of prompts goes to the engine with the fewest samples to draw.

Groups go as a whole, since the samples of a group share their prompt in an engine's cache. An engine that has as many
samples as it decodes at once gets no more; further groups wait here, and each sample that ends may let one go. So
engines with short responses take over work from those with long ones, and none is idle while a group waits. One gate
(:mod:`dataflow.engines.gate`) is before all engines, so a sample's version is exact whichever engine draws it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.rollout import Request, Rollout
from dataflow.engines.samples import SHOWN, prompt_ids
from dataflow.engines.vocabulary import read_vocabulary
from dataflow.engines.weights import WeightNames
from dataflow.errors import RunError

if TYPE_CHECKING:
    import torch


class Replicas(Rollout):
    """A :class:`~dataflow.engines.base.RolloutEngine` over several.

    A sample depends on its seed alone, so the samples equal those of a single engine. If an engine fails, all current
    and later calls raise :class:`ServiceLost`, and all engines have to be rebuilt.

    Args:
        engines: each a :class:`~dataflow.engines.base.RolloutEngine`, with the same model and weights.
        model: its directory or hub id.
        max_prompt_length: P, tokens that a prompt may have.
        slots: samples that an engine decodes at once.
        in_flight: what a sync does with samples in flight: ``wait`` lets them finish, ``abort`` restarts their groups.
        share: turns weights into what the engines' ``sync`` takes, once for all.
        release: called when all engines are closed.

    Raises:
        ModelError: the model's tokenizer or configuration cannot be read.
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
        vocabulary, config = read_vocabulary(model)
        sees = hasattr(config, "vision_config")
        super().__init__(
            vocabulary, WeightNames.of_config(config), max_prompt_length, "a replica", sees, True, in_flight
        )
        self._engines = list(engines)
        self._drawing = [0] * len(engines)
        self._slots = slots
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()
        self._share, self._release = share, release

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncGenerator[Sample, None]:
        """See :meth:`RolloutEngine.generate`; yields the samples of a group once it has all of them.

        Closing the generator aborts its samples in all engines.
        """
        self._check(sampling)
        prompt_ids(prompts, self.max_prompt_length, self.vocabulary.size)  # checks them
        given = prompts.only(*(name for name in ("prompt_ids", SHOWN) if name in prompts))
        works = [partial(self._group, given.select([group]), sampling, seed) for group in prompts.ids]
        async with aclosing(self._gate.draw_all(works)) as groups:
            async for group in groups:
                for sample in group:
                    yield sample

    async def _group(self, prompts: Batch, sampling: Sampling, seed: int) -> list[Sample]:
        """Returns the samples of one group."""
        at = await self._choose(sampling.n)
        left = sampling.n
        found: list[Sample] = []
        try:
            samples: Any = self._engines[at].generate(prompts, sampling, seed)
            async with aclosing(samples):
                async for sample in samples:
                    self._check_version(sample)
                    found.append(sample)
                    left -= 1
                    self._give_back(at, 1)
        finally:
            self._give_back(at, left)
        if left:
            raise RunError(f"{left} samples of group {prompts.ids[0]} are missing")
        return found

    async def _draw(self, request: Request) -> Sample:
        at = await self._choose(1)
        try:
            sample: Sample = await self._engines[at].sample(request.prompt, request.sampling, request.seed)
            self._check_version(sample)
            return sample
        finally:
            self._give_back(at, 1)

    def _check_version(self, sample: Sample) -> None:
        if sample.version != self.version:
            raise RunError(f"a sample was drawn with version {sample.version} of the weights, not {self.version}")

    async def _choose(self, samples: int) -> int:
        """Waits until an engine has a free slot; returns the one with the fewest samples, the first among equals."""
        async with self._turn:
            while min(self._drawing) >= self._slots:
                self._freed.clear()
                await self._freed.wait()
            at = self._drawing.index(min(self._drawing))
            self._drawing[at] += samples
            return at

    def _give_back(self, at: int, samples: int) -> None:
        self._drawing[at] -= samples
        self._freed.set()

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
