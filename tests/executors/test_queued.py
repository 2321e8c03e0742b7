"""Tasks that are queued in their process on Ray: each runs once, with the values that it would have had."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dataflow.batch import Batch
from dataflow.errors import StageFailed
from dataflow.executors.base import Kept, StageCall
from dataflow.executors.ray import RayExecutor
from dataflow.executors.ray.host import Host
from dataflow.graph import Carried, Hosted, Latest, Pipeline, Stage, TaskId, TaskInfo, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(120),
    pytest.mark.shares_ray,
    pytest.mark.usefixtures("local_ray"),
]

STEPS = 4


class Book:
    """A trainer that notes its calls in a file, and what each was given."""

    def __init__(self, path: str = "") -> None:
        self.path, self.shared = path, {"updates": 0}

    def note(self, line: Any) -> None:
        with open(self.path, "a") as file:
            file.write(f"{line}\n")


@dataclass(frozen=True)
class Version:
    step: int
    tags: tuple[str, ...] = ()


@dataclass
class Mutable:
    step: int
    tags: list[str]


@stage(writes="drawn", on="gpu")
def draw(prompts: Any, weights: Carried) -> Batch:
    return Batch([0, 1], {"score": torch.full((2,), float(prompts)), "chat": [["a"], ["b"]]})


@stage(writes="probs", on="gpu")
def probs(drawn: Batch, *, book: Book) -> Batch:
    """Its batch is changed in place by the next task, which the reader after that must not see."""
    time.sleep(0.05)
    book.last = drawn.like(probs=drawn["score"] * 2, words=[["x"], ["y"]])
    book.note(f"probs {float(drawn['score'][0])}")
    return book.last


@stage(writes="actor", on="gpu", role="trains")
def update(probs: Batch, actor: Latest, *, book: Book, make: str, task: Any) -> Any:
    time.sleep(0.05)
    seen = float(probs["probs"][0]), probs["words"][0], getattr(actor, "step", actor)
    book.note(f"update {seen}")
    probs["probs"].add_(100)
    probs["words"][0].append("spoilt")
    book.last["probs"].add_(1000)
    book.shared["updates"] += 1
    if make == "frozen":
        return Version(task.step, ("new",))
    return Mutable(task.step, []) if make == "mutable" else book.shared


@stage(writes="weights", on="gpu", role="syncs")
def gather(actor: Any, probs: Batch, *, book: Book) -> Any:
    time.sleep(0.05)
    what = actor["updates"] if isinstance(actor, dict) else actor.step
    book.note(f"gather {what} {float(probs['probs'][0])} {probs['words'][0]}")
    return None


class Counting(RayExecutor):
    """Counts the queued tasks, and those of them that were sent again."""

    def __init__(self) -> None:
        super().__init__(num_cpus=2)
        self.sent: list[str] = []

    def queue(self, task: Any, call: Any, values: Any) -> None:
        self.sent.append(str(task.id))
        super().queue(task, call, values)


def pipeline(path: Path, make: str, concurrent: bool) -> list[Stage]:
    host = Hosted("book", Book, {"path": str(path)}, concurrent=concurrent)
    return [draw, probs.bind(book=host), update.bind(book=host, make=make), gather.bind(book=host)]


def run(stages: list[Stage], steps: int = STEPS, during: Any = None) -> Counting:
    executor = Counting()
    graph = expand(Pipeline(stages, inputs=["prompts"]), SchedulingPolicy(), steps)
    runner = Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace())

    async def main() -> None:
        try:
            await executor.open(graph.pipeline)
            running = asyncio.ensure_future(asyncio.wait_for(runner.run(), 60))
            if during is not None:
                await during(executor, running)
            await running
        finally:
            await executor.close()

    asyncio.run(main())
    return executor


def expected(make: str) -> list[str]:
    lines, actor = [], None
    for step in range(1, STEPS + 1):
        lines += [f"probs {float(step)}", f"update {(2.0 * step, ['x'], actor)}"]
        lines += [f"gather {step} {2.0 * step} ['x']"]
        actor = {"updates": step} if make == "shared" else step
    return lines


@pytest.mark.parametrize("concurrent", [True, False])
@pytest.mark.parametrize("make", ["frozen", "mutable", "shared"])
def test_each_runs_once_with_the_values_that_were_written(tmp_path, make, concurrent):
    """Also where the task before it wrote what its service changes later, so that it is not kept and is sent again."""
    log = tmp_path / "log"
    executor = run(pipeline(log, make, concurrent))
    assert log.read_text().splitlines() == expected(make)
    assert executor.sent


def test_a_task_does_not_run_behind_one_that_failed(tmp_path):
    log = tmp_path / "log"
    probs_, update_, gather_ = pipeline(log, "frozen", True)[1:]
    with pytest.raises(StageFailed, match="broken"):
        run([draw, probs_, replace(update_, fn=broken), gather_])
    assert log.read_text().splitlines() == ["probs 1.0", "failing"]


def broken(probs: Batch, actor: Any, *, book: Book, make: str, task: Any) -> Any:
    time.sleep(0.1)
    book.note("failing")
    raise ValueError("broken")


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_run_that_is_cancelled_leaves_no_queued_task_behind(tmp_path, concurrent):
    log = tmp_path / "log"
    probs_, update_, gather_ = pipeline(log, "frozen", concurrent)[1:]

    async def cancel(executor: Counting, running: asyncio.Future[Any]) -> None:
        await until_sent(executor, "gather[1]")
        running.cancel()

    with pytest.raises(asyncio.CancelledError):
        run([draw, probs_, replace(update_, fn=slow), gather_], during=cancel)
    assert "gather 1 2.0 ['x']" not in log.read_text()


@pytest.mark.parametrize("concurrent", [True, False])
def test_a_value_that_cannot_be_pickled_fails_the_task_that_wrote_it(tmp_path, concurrent):
    """Ray would fail the task that reads it, whose author cannot know why."""
    probs_, update_, gather_ = pipeline(tmp_path / "log", "frozen", concurrent)[1:]
    with pytest.raises(StageFailed, match=r"^update.*returned a tuple as field 'actor' that cannot be"):
        run([draw, probs_, replace(update_, fn=locked), gather_])


def locked(probs: Batch, actor: Any, *, book: Book, make: str, task: Any) -> Any:
    return threading.Lock(), 1


async def until_sent(executor: Counting, task: str) -> None:
    deadline = time.monotonic() + 30
    while task not in executor.sent and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


def test_the_next_run_on_an_executor_takes_no_answer_of_a_cancelled_one(tmp_path):
    """The answer of the queued task, which Ray may not take back, does not pass for that of the next run's."""
    log = tmp_path / "log"
    stages = pipeline(log, "frozen", True)
    slowly = [*stages[:2], replace(stages[2], fn=soon), stages[3]]
    graph = expand(Pipeline(slowly, inputs=["prompts"]), SchedulingPolicy(), 1)
    only = graph.pipeline.subset(["gather"])
    drawn = Batch([0, 1], {"probs": torch.full((2,), 999.0), "words": [["z"], ["z"]]})
    inputs = {"actor": lambda step: {"updates": 7}, "probs": lambda step: drawn}

    async def main() -> None:
        executor = Counting()
        try:
            await executor.open(graph.pipeline)
            runner = Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace())
            first = asyncio.ensure_future(runner.run())
            await until_sent(executor, "gather[1]")
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            second = Runner(expand(only, SchedulingPolicy(), 1), executor, inputs=inputs, trace=Trace())
            await asyncio.wait_for(second.run(), 30)
        finally:
            await executor.close()

    asyncio.run(main())
    first, second, *_taken_back, last = log.read_text().splitlines()
    assert (first, second, last) == ("probs 1.0", "updating", "gather 7 999.0 ['z']")


def test_a_process_that_forgot_a_task_runs_none_that_is_queued_behind_it():
    one, other = TaskId(1, "update"), TaskId(2, "update")
    call = StageCall("gather", TaskInfo(2, "gather"), (), None, after=one)
    for forgotten, runs in ((one, False), (other, True)):
        host = Host()
        host.stages = {"gather": gather}
        host._ended = {"gpu": (one, {"actor": 1})}
        host.forget(forgotten)
        assert (host._completed(call, [Kept("actor")]) == [1]) is runs


def soon(probs: Batch, actor: Any, *, book: Book, make: str, task: Any) -> Any:
    """Ends long before its process would be killed."""
    book.note("updating")
    time.sleep(0.7)
    return Version(task.step)


def slow(probs: Batch, actor: Any, *, book: Book, make: str, task: Any) -> Any:
    book.note("updating")
    time.sleep(1.5)
    return Version(task.step)


def test_the_end_of_a_task_is_known_while_the_queued_one_runs(tmp_path):
    """Ray would hold its answer back until the loop of the process is free again."""
    log = tmp_path / "log"
    probs_, update_, gather_ = pipeline(log, "frozen", True)[1:]
    with pytest.raises(StageFailed, match=r"^update"):
        run([draw, probs_, replace(update_, fn=dies), gather_])
    assert log.read_text().splitlines() == ["probs 1.0", "dying"]


def dies(probs: Batch, actor: Any, *, book: Book, make: str, task: Any) -> Any:
    book.note("dying")
    time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)
