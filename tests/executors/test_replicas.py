"""The replicas of an engine in actors: what travels, what their errors say, and what ends with what."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.errors import ConfigError, DataError, RunError, ServiceLost
from dataflow.executors.ray import replicas
from dataflow.running.services.replicas import build_replicas
from tests.engines.drawing import run
from tests.rigs.processes import left

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(120),
    pytest.mark.shares_ray,
    pytest.mark.usefixtures("by_value"),
]

SAMPLING = Sampling(n=2, max_tokens=3)


class Engine:
    """Its samples say which process drew them; those of a prompt that begins with 2 never end."""

    def __init__(self, raises: str = "", **_options: Any) -> None:
        if raises:
            raise ConfigError(raises) if raises.startswith("config") else ZeroDivisionError(raises)
        self.version, self.weights, self.cancelled = 0, {}, 0

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        if seed[0] == 666:
            raise DataError("rollout: not to this engine's taste.")
        if prompt[0] == 2:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled += 1
        return Sample(0, 0, [os.getpid(), *prompt, *seed], [-0.5], self.version, "stop")

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        self.weights, self.version = dict(weights), version

    async def wake(self) -> int:
        return self.cancelled

    def close(self) -> None: ...


def asking(first: Sequence[int]) -> Batch:
    return Batch(list(range(len(first))), {"prompt_ids": [[token, 7] for token in first]})


def test_what_travels_and_that_a_dead_one_loses_all(tiny_qwen: Path) -> None:
    options = {"model": str(tiny_qwen), "max_prompt_length": 8}

    async def body() -> None:
        several = build_replicas(Engine, options, 2, slots=8, threads=1)
        found = [sample async for sample in several.generate(asking([9] * 6), SAMPLING, 0)]
        pids = sorted({int(sample.tokens[0]) for sample in found})
        assert (len(found), len(pids)) == (12, 2)
        assert (await several.sample([5, 6], SAMPLING, (1, 2))).tokens[1:] == [5, 6, 1, 2]
        with pytest.raises(DataError, match=r"^rollout: not to this engine's taste\."):
            _ = [sample async for sample in several.generate(asking([9]), SAMPLING, 666)]

        weights = {
            "a": torch.randn(3, 4),
            "b": torch.randn(5).bfloat16(),
            "c": torch.tensor(2.5),
            "d": torch.arange(12).reshape(3, 4).t(),
        }
        shared = replicas.share(weights)
        for engine in several._engines:
            await engine.sync(shared, 0)
            there = await engine.actor.__ray_call__.remote(lambda host: host.service.weights)  # type: ignore[attr-defined]
            assert all(torch.equal(there[name], value) for name, value in weights.items())

        # An abandoned group is abandoned in its engine, too.
        async with aclosing(several.generate(asking([2]), SAMPLING, 0)) as samples:
            waiting = asyncio.ensure_future(anext(samples))
            await asyncio.sleep(1.0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
        while not sum([await engine.call("wake") for engine in several._engines]):  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)

        drawing = asyncio.ensure_future(anext(several.generate(asking([2] * 6), SAMPLING, 0)))
        await asyncio.sleep(0.5)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(ServiceLost, match=r"replica [12] of 2: the process that ran it died .*rebuilt"):
            await drawing
        await several.close()
        await several.close()
        assert not left(pids, timeout=30)

    run(body())


def test_an_engine_that_cannot_be_built_says_why() -> None:
    with pytest.raises(ConfigError, match=r"^config: no"):
        replicas.start(Engine, {"raises": "config: no"}, 1)
    with pytest.raises(RunError, match=r"^rollout: a replica: ZeroDivisionError: oh"):
        replicas.start(Engine, {"raises": "oh"}, 1)
