"""Stages that raise exceptions which end a process, or cannot be sent: the run fails with a clear error."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dataflow.errors import RunError, StageFailed
from dataflow.executors.base import Executor
from dataflow.executors.inline import InlineExecutor
from dataflow.graph import Hosted, Pipeline, Stage, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace

pytestmark = [pytest.mark.timeout(120), pytest.mark.shares_ray]


class TwoArguments(Exception):
    """One that can be pickled and not be read again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


RAISED = [
    (lambda: SystemExit(3), "SystemExit: 3"),
    (lambda: GeneratorExit(), "GeneratorExit"),
    (lambda: asyncio.CancelledError(), "CancelledError"),
    (lambda: StopIteration(1), "StopIteration"),
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


def failures_of(stages: Sequence[Stage], executor: Executor) -> list[str]:
    """Runs each stage alone, all in one service, which survives their failures; returns the messages."""
    tool = Hosted("tool", Tool, concurrent=True)
    found = []

    async def body() -> None:
        async with asyncio.timeout(100):
            try:
                for stage_ in stages:
                    pipeline = Pipeline([stage_.bind(tool=tool)], inputs=["prompts"], resources={"controller": 1})
                    await executor.open(pipeline)
                    graph = expand(pipeline, SchedulingPolicy(), 1)
                    with pytest.raises(StageFailed) as failed:
                        await Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace()).run()
                    found.append(str(failed.value))
                    assert await executor.ask("tool", "answer") == 3, "the tool's process is gone"
            finally:
                await executor.close()

    asyncio.run(body())
    return found


@pytest.mark.parametrize("which", range(len(RAISED)), ids=[said.split(":")[0] for _, said in RAISED])
@pytest.mark.parametrize("stage_", [now, later], ids=["sync", "async"])
def test_inline(stage_: Any, which: int) -> None:
    (message,) = failures_of([stage_.bind(which=which)], InlineExecutor())
    assert RAISED[which][1] in message


@pytest.mark.heavy
def test_ray(local_ray: None) -> None:
    from dataflow.executors.ray import RayExecutor

    cases = (0, 2, 4)
    stages = [later.bind(which=which) for which in cases]
    *messages, chained = failures_of([*stages, behind_a_cause.bind(which=4)], RayExecutor(num_cpus=2))
    for which, message in zip(cases, messages, strict=True):
        assert RAISED[which][1] in message
    assert "the call failed" in chained


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
