"""A process that user code forks does not continue as the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dataflow.batch import Batch
from dataflow.errors import StageFailed
from dataflow.executors.inline import InlineExecutor
from dataflow.graph import Pipeline, stage
from dataflow.policy import expand, preset
from dataflow.reward_agent import RewardAgent
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace
from dataflow.usercode.forks import in_one_process

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")


def _returns() -> None:
    os.fork()


def _raises() -> None:
    if os.fork() == 0:
        os.execv("/no/such/program", ["it"])


FORKS = pytest.mark.parametrize("fork", [_returns, _raises])


def _ended(left: Path) -> None:
    """Checks that this process alone came as far as here."""
    with left.open("a") as file:
        file.write(f"{os.getpid()}\n")
    _pid, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 1
    assert left.read_text() == f"{os.getpid()}\n"


@FORKS
def test_only_the_first_process_leaves_the_block(tmp_path: Path, fork: Callable[[], None]) -> None:
    with in_one_process():
        fork()
    _ended(tmp_path / "left")


class Rewards:
    """Reward objects, one of whose methods forks at its first call."""

    class Sync:
        def __init__(self, fork: Callable[[], None]) -> None:
            self._forks = [fork]

        def _fork(self) -> None:
            if self._forks:
                self._forks.pop()()

        def compute_score(self, **_arguments: Any) -> float:
            self._fork()
            return 1.0

    class Async(Sync):
        async def compute_score(self, **_arguments: Any) -> float:  # type: ignore[override]
            await asyncio.sleep(0)
            self._fork()
            await asyncio.sleep(0.01)
            return 1.0

    class Subtask(Sync):
        async def compute_score(self, **_arguments: Any) -> float:  # type: ignore[override]
            async def inner() -> float:
                self._fork()
                return 1.0

            return await asyncio.create_task(inner())

    class Usage(Sync):
        def compute_score(self, **_arguments: Any) -> float:
            return 1.0

        def usage(self) -> dict[str, float]:
            self._fork()
            return {"calls": 1.0}

    class Close(Sync):
        def compute_score(self, **_arguments: Any) -> float:
            return 1.0

        async def close(self) -> None:
            self._fork()


@FORKS
@pytest.mark.parametrize("kind", [Rewards.Sync, Rewards.Async, Rewards.Subtask, Rewards.Usage, Rewards.Close])
def test_of_a_reward(tmp_path: Path, fork: Callable[[], None], kind: type) -> None:
    async def body() -> None:
        agent = RewardAgent(kind(fork))
        agent.submit(1, Batch([0], {"response_text": ["7"], "ground_truth": ["7"], "data_source": ["d"]}))
        rewards = await agent.collect(1)
        assert rewards["score"].tolist() == [1.0]
        if kind is Rewards.Usage:
            agent.stats()
        await agent.close()

    async def limited() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(limited())
    _ended(tmp_path / "left")


class NoRead(Exception):
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@stage(writes="done", on="controller")
def plain(prompts: Any, *, does: Callable[[], None]) -> int:
    does()
    return 1


@stage(writes="done", on="controller")
async def later(prompts: Any, *, does: Callable[[], None]) -> int:
    await asyncio.sleep(0)
    does()
    await asyncio.sleep(0.01)
    return 1


def _run_stage(made: Any, does: Callable[[], None]) -> None:
    pipeline = Pipeline(stages=[made.bind(does=does)], inputs=["prompts"], resources={"controller": 1})
    graph = expand(pipeline, preset("baseline", 1), steps=1, mini_batches=1)
    runner = Runner(graph, InlineExecutor(), inputs={"prompts": lambda _step: 0}, trace=Trace())
    asyncio.run(asyncio.wait_for(runner.run(), 30))


@pytest.mark.parametrize("made", [plain, later])
def test_of_a_stage(tmp_path: Path, made: Any) -> None:
    _run_stage(made, _returns)
    _ended(tmp_path / "left")


@pytest.mark.parametrize("made", [plain, later])
def test_a_stage_whose_exception_cannot_be_read(made: Any) -> None:
    def fail() -> None:
        raise NoRead

    with pytest.raises(StageFailed, match="NoRead, which cannot be read"):
        _run_stage(made, fail)
