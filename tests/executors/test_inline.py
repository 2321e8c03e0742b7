"""What only the inline executor does: tasks of one process get copies, so that none sees what another changes."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.errors import PipelineError
from dataflow.executors.inline import InlineExecutor
from dataflow.graph import Hosted, Pipeline, stage
from dataflow.policy import expand, preset
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace

pytestmark = pytest.mark.timeout(60)

KEPT: list[Batch] = []


@stage(writes="drawn", on="gpu")
def draw(prompts: Batch) -> Batch:
    spoil(prompts)
    for batch in KEPT:  # what it returned in the step before
        spoil(batch)
    KEPT.append(Batch([0, 1], {"chat": [["a"], ["b"]], "score": torch.zeros(2)}, {"facts": ["x"]}))
    return KEPT[-1]


@stage(writes="first", on="controller")
def one(drawn: Batch, prompts: Batch) -> Any:
    return [spoil(drawn), spoil(prompts)]


@stage(writes="second", on="controller")
async def other(drawn: Batch, prompts: Batch, first: Any) -> Any:
    return [spoil(drawn), spoil(prompts)]


@stage(writes="third", on="controller")
def last(first: Any, second: Any, *, seen: Any) -> None:
    seen += [*first, *second]


def spoil(batch: Batch) -> tuple[list[int], list[float], int]:
    """Returns what is there, then changes all of it."""
    found = [len(chat) for chat in batch["chat"]], batch["score"].tolist(), len(batch.meta["facts"])
    for chat in batch["chat"]:
        chat.append("spoilt")
    batch["score"].add_(1)
    batch.meta["facts"].append("spoilt")
    batch.groups[0] = 7
    return found


def test_stages_that_change_what_they_read() -> None:
    KEPT.clear()
    seen: list[Any] = []
    prompts = Batch([0, 1], {"chat": [["a"], ["b"]], "score": torch.zeros(2)}, {"facts": ["x"]})
    stages = [draw, one, other, last.bind(seen=seen)]
    pipeline = Pipeline(stages, inputs=["prompts"], resources={"gpu": 1, "controller": 1})
    graph = expand(pipeline, preset("off-policy", 1), steps=3, mini_batches=1)
    inputs = {"prompts": lambda step: prompts}
    asyncio.run(asyncio.wait_for(Runner(graph, InlineExecutor(), inputs=inputs, trace=Trace()).run(), 30))
    assert seen == [([1, 1], [0.0, 0.0], 1)] * 12
    assert [len(chat) for chat in prompts["chat"]] == [1, 1]


def decorated(function: Any) -> Any:
    """A decorator that is no coroutine function itself, as those of tracing libraries."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    return wrapper


@stage(writes="told", on="controller")
@decorated
async def told(prompts: int) -> int:
    await asyncio.sleep(0)
    return prompts + 1


@stage(on="controller")
def hear(told: int, *, seen: list[int]) -> None:
    seen.append(told)


def test_a_decorated_async_stage_is_awaited() -> None:
    seen: list[int] = []
    graph = expand(Pipeline([told, hear.bind(seen=seen)], inputs=["prompts"]), preset("baseline", 1), 2)
    asyncio.run(Runner(graph, InlineExecutor(), inputs={"prompts": lambda step: step}, trace=Trace()).run())
    assert seen == [2, 3]


def test_it_has_one_process() -> None:
    two = hear.bind(renamed={"told": "prompts"}, seen=Hosted("trainer", list, ranks=2))
    with pytest.raises(PipelineError, match="'trainer' needs 2 processes, but executor=inline has one"):
        asyncio.run(InlineExecutor().open(Pipeline([two], inputs=["prompts"])))


def test_a_cancelled_task_has_ended_when_the_executor_is_closed() -> None:
    begun, ended = asyncio.Event(), []

    @stage(writes="x", on="gpu")
    async def slow(prompts: int) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # what a request does to end
            ended.append(prompts)

    async def body() -> None:
        pipeline, executor = Pipeline([slow], inputs=["prompts"]), InlineExecutor()
        await executor.open(pipeline)
        graph = expand(pipeline, preset("baseline", 1), 1)
        runner = Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace())
        running = asyncio.ensure_future(runner.run())
        await begun.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await executor.close()
        assert ended == [1]

    asyncio.run(body())
