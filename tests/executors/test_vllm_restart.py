"""vLLM's process is killed during a run: it is rebuilt with the newest weights, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.engines.base import Sampling
from dataflow.engines.vllm.engine import VllmRollout
from dataflow.executors.ray import RayExecutor
from dataflow.graph import Hosted, Latest, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.stages.rollout import rollout
from dataflow.stages.sync import sync_weights
from dataflow.timeline.spans import Span, Trace
from tests.engines import tiny_models
from tests.engines.tiny_models import greedy, load, prompts, save_model

pytestmark = [pytest.mark.heavy, pytest.mark.vllm, pytest.mark.timeout(240), pytest.mark.shares_ray]

LENGTHS, LIMIT = [5, 9, 3, 7], 12


@pytest.fixture(autouse=True)
def by_value(local_ray: None) -> Iterator[None]:
    import cloudpickle

    cloudpickle.register_pickle_by_value(tiny_models)  # which a worker cannot import
    yield
    cloudpickle.unregister_pickle_by_value(tiny_models)


class Engine(VllmRollout):
    """Its process is vLLM's own, beside the actor's: both start again when it dies."""

    def pid(self) -> int:
        (process,) = self._engine.engine_core.resources.engine_manager.processes
        return process.pid


class Trainer:
    """Its weights after step n are those of the n-th file; it remembers what it was given."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths
        self.seen: dict[int, list[list[int]]] = {}

    def weights(self, step: int) -> dict[str, Any]:
        import torch

        return torch.load(self.paths[step])

    def given(self) -> dict[int, list[list[int]]]:
        return self.seen


@stage(writes="actor", on="gpu")
def update(responses: Batch, actor: Latest, *, trainer: Trainer, task) -> int:
    whole = zip(responses["responses"].tolist(), responses["response_mask"].sum(dim=1).tolist(), strict=True)
    trainer.seen[task.step] = [tokens[:length] for tokens, length in whole]
    return task.step


@stage(writes="actor_weights", on="gpu")
def gather(actor: int, *, trainer: Trainer) -> dict[str, Any]:
    return trainer.weights(actor)


def test_it_goes_on_with_the_newest_weights(tmp_path: Path) -> None:
    import torch

    steps = 3
    paths = [save_model(tmp_path / str(seed), seed) for seed in range(steps + 1)]
    models = [load(path) for path in paths]
    weights = [str(tmp_path / f"{seed}.pt") for seed in range(steps + 1)]
    for model, path in zip(models, weights, strict=True):
        torch.save({name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}, path)
    options = {"model": paths[0], "max_prompt_length": 12, "max_tokens": LIMIT, "kv_cache_bytes": 32 << 20}
    engine = Hosted("rollout", Engine, options, concurrent=True, restarts=1)
    trainer = Hosted("trainer", Trainer, {"paths": weights})
    pipeline = Pipeline(
        [
            rollout.bind(engine=engine, sampling=Sampling(temperature=0.0, max_tokens=LIMIT), seed=0),
            update.bind(trainer=trainer),
            gather.bind(trainer=trainer),
            sync_weights.bind(engine=engine),
        ],
        inputs=["prompts"],
    )
    asked = prompts(LENGTHS)
    executor = RayExecutor(num_cpus=2)
    trace = Trace()

    async def body() -> tuple[dict[int, list[list[int]]], int]:
        pid = 0

        def kill(span: Span) -> None:
            # Its next task, the rollout of step 2, is on its way or will be lost on it.
            if span.stage == "sync_weights" and span.step == 1:
                os.kill(pid, signal.SIGKILL)

        try:
            await executor.open(pipeline)
            pid = await executor.ask("rollout", "pid")
            graph = expand(pipeline, SchedulingPolicy(), steps)
            runner = Runner(graph, executor, inputs={"prompts": lambda step: asked}, trace=trace, on_span=kill)
            await asyncio.wait_for(runner.run(), 200)
            return await executor.ask("trainer", "given"), await executor.ask("rollout", "pid") - pid
        finally:
            await executor.close()

    given, other = asyncio.run(body())
    assert other, "another process"
    for step in range(1, steps + 1):
        assert given[step] == [greedy(models[step - 1], prompt, LIMIT) for prompt in asked["prompt_ids"]], (
            f"step {step}"
        )
    assert next(s for s in trace.spans if s.task == "rollout[2]").args["restarted"] == 1
