"""A rollout engine that returns scripted turns, with a real tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.samples import to_batch

Script = Callable[[int, int, int], str]


class ScriptedRollout:
    """Turns as they are written, each ended by eos unless it is longer than it may be.

    Args:
        tokenizer: writes the tokens.
        script: what is said in turn t of sample i of group g.
        versions: of the weights at each turn; the last one's from then on.
        hold: awaited before a turn is said, with (g, i, t).
    """

    version = 0

    def __init__(self, tokenizer: Any, script: Script, versions: Sequence[int] = (0,), hold: Any = None) -> None:
        self.tokenizer, self._script, self._versions, self._hold = tokenizer, script, versions, hold
        self.asked: dict[tuple[int, int, int], list[int]] = {}
        self.seeds: list[tuple[int, ...]] = []
        self.limits: dict[tuple[int, int, int], int] = {}
        self.running = 0

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        _of_run, group, index, turn = seed
        key = (group, index, turn)
        assert key not in self.asked, "a turn is asked for once"
        self.asked[key], self.limits[key] = list(prompt), sampling.max_tokens
        self.seeds.append(tuple(seed))
        self.running += 1
        try:
            await asyncio.sleep(0)
            if self._hold is not None:
                await self._hold(*key)
        finally:
            self.running -= 1
        said = [*self.tokenizer.encode(self._script(*key), add_special_tokens=False), self.tokenizer.eos_token_id]
        tokens = said[: sampling.max_tokens]
        version = self._versions[min(turn, len(self._versions) - 1)]
        log_probs = [log_prob(turn, at) for at in range(len(tokens))]
        return Sample(0, 0, tokens, log_probs, version, "stop" if tokens == said else "length")

    def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncIterator[Sample]:
        raise NotImplementedError

    def text(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def batch(self, prompts: Batch, samples: Sequence[Sample], length: int) -> Batch:
        return to_batch(prompts, samples, length, self.tokenizer, self.tokenizer.pad_token_id)

    async def sync(self, weights: Mapping[str, Any], version: int) -> None:
        self.version = version

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    async def abort(self) -> int:
        return 0

    def stats(self) -> dict[str, float]:
        return {"running": self.running}

    def close(self) -> None: ...


def log_prob(turn: int, at: int) -> float:
    """The log-prob of a token that it says."""
    return -1.0 - turn - at / 1024


def call(name: str, **arguments: Any) -> str:
    """A call as the hermes format has it."""
    import json

    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
