"""Stages that raise what would end a process, or what cannot be read or sent: the run fails and says what it was."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from dataflow.errors import RunError, StageFailed
from dataflow.executors.base import Executor
from dataflow.executors.inline import InlineExecutor
from dataflow.graph import Hosted, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace

pytestmark = pytest.mark.timeout(120)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    def __getattr__(self, name: str) -> Any:
        raise KeyboardInterrupt(name)


class TwoArguments(Exception):
    """One that can be pickled and not be read again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


RAISED = [
    (lambda: SystemExit(3), "SystemExit: 3"),
    (lambda: KeyboardInterrupt("stop"), "KeyboardInterrupt: stop"),
    (lambda: GeneratorExit(), "GeneratorExit"),
    (lambda: asyncio.CancelledError(), "CancelledError"),
    (lambda: StopIteration(1), "StopIteration"),
    (lambda: Unreadable(), "Unreadable: its __str__ raised ValueError"),
    (lambda: TwoArguments(1, 2), "TwoArguments: 1 and 2"),
    (lambda: ValueError("x" * 100_000_000), "ValueError: xxx"),
]


class Tool:
    async def answer(self) -> int:
        return 3


@stage(writes="number", on="controller")
def now(prompts, *, which, tool):
    raise RAISED[which][0]()


@stage(writes="number", on="controller")
async def later(prompts, *, which, tool):
    await asyncio.sleep(0)
    raise RAISED[which][0]()


@stage(writes="number", on="controller")
async def behind_a_cause(prompts, *, which, tool):
    raise RunError("the call failed") from RAISED[which][0]()


def failure_of(stage_: Any, which: int, executor: Executor) -> str:
    tool = Hosted("tool", Tool, concurrent=True)
    pipeline = Pipeline([stage_.bind(which=which, tool=tool)], inputs=["prompts"], resources={"controller": 1})

    async def body() -> None:
        async with asyncio.timeout(100):
            await executor.open(pipeline)
            try:
                graph = expand(pipeline, SchedulingPolicy(), 1)
                await Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace()).run()
            finally:
                assert await executor.ask("tool", "answer") == 3, "the tool's process is gone"
                await executor.close()

    with pytest.raises(StageFailed) as failed:
        asyncio.run(body())
    return str(failed.value)


@pytest.mark.parametrize("which", range(len(RAISED)), ids=[said.split(":")[0] for _, said in RAISED])
@pytest.mark.parametrize("stage_", [now, later], ids=["sync", "async"])
def test_inline(stage_: Any, which: int) -> None:
    assert RAISED[which][1] in failure_of(stage_, which, InlineExecutor())


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    import ray

    from dataflow.executors.ray import RayExecutor

    RayExecutor(num_cpus=2)._init()
    yield
    ray.shutdown()


@pytest.mark.heavy
def test_ray(local_ray: None) -> None:
    from dataflow.executors.ray import RayExecutor

    for which in (0, 1, 3, 5, 6):
        assert RAISED[which][1] in failure_of(later, which, RayExecutor(num_cpus=2))
    assert "the call failed" in failure_of(behind_a_cause, 5, RayExecutor(num_cpus=2))


def test_an_input_that_raises_is_named() -> None:
    pipeline = Pipeline([now.bind(which=0, tool=None)], inputs=["prompts"], resources={"controller": 1})

    def prompts(step: int) -> Any:
        raise SystemExit("no more")

    async def body() -> None:
        executor = InlineExecutor()
        await executor.open(pipeline)
        graph = expand(pipeline, SchedulingPolicy(), 1)
        await Runner(graph, executor, inputs={"prompts": prompts}, trace=Trace()).run()

    with pytest.raises(RunError, match="input 'prompts' of step 1: its function raised SystemExit: no more"):
        asyncio.run(body())
