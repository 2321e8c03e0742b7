"""A rollout engine without a model: when each sample ends, and its content, are fixed beforehand."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling


class FakeRollout:
    """Samples end in a random order, a few milliseconds apart; their tokens are group, index, seed and version.

    Args:
        seed: of that order.
        version: of the weights it is built with.
        deaths: a file that tells of it; this process is killed in the midst of a rollout, once.
    """

    def __init__(self, seed: int = 0, version: int = 0, deaths: str | None = None) -> None:
        self.version = version
        self.asked: list[tuple[int, tuple[int, ...]]] = []
        self.running = 0
        self.slept: list[str] = []
        self._dice = random.Random(seed)
        self._deaths = None if deaths is None else Path(deaths)

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncIterator[Sample]:
        self.asked.append((seed, prompts.ids))
        left = [(group, index) for group in prompts.ids for index in range(sampling.n)]
        self._dice.shuffle(left)
        half = len(left) // 2
        self.running += len(left)
        try:
            while left:
                await asyncio.sleep(0.002)
                if self._deaths is not None and self.version and len(left) == half and not self._deaths.exists():
                    self._deaths.touch()
                    await asyncio.sleep(0.5)  # chunks emitted before must have left this process
                    os.kill(os.getpid(), signal.SIGKILL)
                group, index = left.pop()
                self.running -= 1
                yield self._made(group, index, seed)
        finally:
            self.running -= len(left)

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        await asyncio.sleep(0.001)
        return self._made(0, 0, sum(seed))

    def _made(self, group: int, index: int, seed: int) -> Sample:
        return Sample(group, index, [group, index, seed % 1000, self.version], [0.0] * 4, self.version, "stop")

    def text(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def batch(self, prompts: Batch, samples: Sequence[Sample], length: int) -> Batch:
        rows = sorted(samples, key=lambda sample: (prompts.ids.index(sample.group), sample.index))
        texts = [sample.text or self.text(sample.tokens) for sample in rows]
        return Batch(
            [sample.group for sample in rows],
            {
                "response_text": texts,
                "data_source": ["fake"] * len(rows),
                "ground_truth": [str(sample.group) for sample in rows],
                "version": [sample.version for sample in rows],
            },
            {"weights_version": min(sample.version for sample in rows)},
        )

    async def sync(self, weights: Mapping[str, Any], version: int) -> None:
        assert not self.running
        self.version = version

    async def sleep(self) -> None:
        self.slept.append("sleep")

    async def wake(self) -> None:
        self.slept.append("wake")

    async def abort(self) -> int:
        return 0

    def stats(self) -> dict[str, float]:
        return {"running": self.running}

    def heard(self) -> list[tuple[int, tuple[int, ...]]]:
        """Returns seed and groups of each rollout that it was asked for."""
        return self.asked

    def close(self) -> None: ...
