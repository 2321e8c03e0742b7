"""The Ray actor of one rollout engine among several; its client is in engines/replicas/engine.py.

Loading this module does not import torch, since the number of threads must be set first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

from dataflow.batch import Batch
from dataflow.engines.base import RolloutEngine, Sample, Sampling
from dataflow.executors.ray.nodes import see
from dataflow.executors.ray.paths import SeesPaths
from dataflow.stage import Hosted

if TYPE_CHECKING:
    import torch


class Replica(SeesPaths):
    """The actor: one engine, whose calls run concurrently on one event loop."""

    async def build(
        self,
        factory: str | Callable[..., RolloutEngine],
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        *gpus: str,
    ) -> None:
        """Builds the engine on these GPUs, or on those that Ray assigned if none are given."""
        os.environ.update(environment)
        see(gpus)
        self.engine: RolloutEngine = Hosted("replica", factory, options).build()
        # Otherwise the first Batch would import it, and its task would take seconds longer.
        import torch  # noqa: F401

        self._drawing: dict[int, asyncio.Task[None]] = {}
        self._cancelled: set[int] = set()

    async def draw(
        self, key: int, prompts: Mapping[int, list[int]], sampling: Sampling, seed: int | tuple[int, ...]
    ) -> AsyncIterator[tuple[list[Sample], dict[str, float]]]:
        """Samples these groups, or a turn; yields the samples finished since the last yield, and the engine's stats."""
        if key in self._cancelled:  # the cancellation overtook this call
            self._cancelled.discard(key)
            return
        ended: asyncio.Queue[Sample | None] = asyncio.Queue()

        async def turn(seed: tuple[int, ...]) -> None:
            (prompt,) = prompts.values()
            ended.put_nowait(await self.engine.sample(prompt, sampling, seed))

        async def groups(seed: int) -> None:
            batch = Batch(list(prompts), {"prompt_ids": list(prompts.values())})
            samples: Any = self.engine.generate(batch, sampling, seed)
            async with contextlib.aclosing(samples):
                async for sample in samples:
                    ended.put_nowait(sample)

        work: Coroutine[Any, Any, None] = turn(seed) if isinstance(seed, tuple) else groups(seed)
        task = self._drawing[key] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _task: ended.put_nowait(None))
        try:
            over = False
            while not over:
                found = [await ended.get()]
                while not ended.empty():
                    found.append(ended.get_nowait())
                over = found[-1] is None
                if samples := [sample for sample in found if sample is not None]:
                    yield samples, self.engine.stats()
            if not task.cancelled():
                await task
        finally:
            task.cancel()
            del self._drawing[key]

    async def cancel(self, key: int) -> None:
        """Aborts the call of :meth:`draw` with this key and waits until the engine has freed it."""
        if (task := self._drawing.get(key)) is None:
            self._cancelled.add(key)
            return
        task.cancel()
        await asyncio.wait([task])

    async def sync(self, packed: Mapping[str, Any], version: int) -> None:
        await self.engine.sync(unpack(packed), version)

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake(self) -> None:
        await self.engine.wake()

    async def close(self) -> None:
        closed = self.engine.close()
        if asyncio.iscoroutine(closed):
            await closed


def pack(weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Returns dtype, shape and bytes of each weight: Ray stores arrays without a copy and reads them in place."""
    import torch

    return {
        name: (value.dtype, tuple(value.shape), value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        for name, value in weights.items()
    }


def unpack(packed: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the weights; they are read-only."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return {
            name: torch.from_numpy(data).view(dtype).reshape(shape) if data.size else torch.empty(shape, dtype=dtype)
            for name, (dtype, shape, data) in packed.items()
        }
