"""Several rollout engines as one: each sample goes to the engine that has the fewest, those of a group together.

An engine that has as many samples as it decodes at once gets no more; further ones wait here
(:mod:`dataflow.engines.least_load`). So engines with short responses take over work from those with long ones. One gate
(:mod:`dataflow.engines.gate`) is before all engines, so a sample's version is exact whichever engine draws it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from dataflow.engines.base import Sample
from dataflow.engines.least_load import LeastLoad
from dataflow.engines.rollout import Request, Rollout
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
        share: Callable[[Mapping[str, torch.Tensor]], Any] = dict,
        release: Callable[[], None] = lambda: None,
        in_flight: Literal["wait", "abort"] = "wait",
    ) -> None:
        super().__init__(model, max_prompt_length, "a replica", True, in_flight)
        self._engines = list(engines)
        self._choice = LeastLoad(self._engines, slots)
        self._share, self._release = share, release

    async def _draw(self, request: Request) -> Sample:
        engine = await self._choice.take(request.seed[:2])
        try:
            sample: Sample = await engine.sample(request.prompt, request.sampling, request.seed)
        finally:
            self._choice.give_back(engine)
        if sample.version != self.version:
            raise RunError(f"a sample was drawn with version {sample.version} of the weights, not {self.version}")
        return replace(sample, group=request.group, index=request.index)

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
