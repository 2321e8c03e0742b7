"""The same behaviour of every executor: inline in this process, ray in processes of its own."""

from __future__ import annotations

import asyncio
import re
import threading

import pytest

from dataflow.batch import Batch
from dataflow.errors import RunError, StageFailed
from dataflow.graph import Carried, Hosted, Latest, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand, preset
from dataflow.runner import Restored, Runner
from dataflow.system import clock
from dataflow.testing import check_trace
from dataflow.timeline.spans import Trace

pytestmark = [pytest.mark.timeout(120), pytest.mark.shares_ray]

GROUPS, N = 8, 2


class Engine:
    """Samples are the version they were drawn from."""

    def __init__(self, first: int = 0) -> None:
        self.version = first

    def generate(self, prompts: Batch) -> Batch:
        rows = prompts.repeat(N)
        return Batch(rows.groups, {"version": [self.version] * len(rows)}, {"weights_version": self.version})


class Trainer:
    """Counts what it trained on; a digest of it is its weights."""

    def __init__(self) -> None:
        self.weights: list[tuple[int, ...]] = []
        self.closed = False

    def update(self, batch: Batch) -> None:
        self.weights.append(batch.ids)

    def digest(self) -> list[tuple[int, ...]]:
        return self.weights


class Agent:
    """Returns groups, the odd ones first, as if they had arrived before the even."""

    def __init__(self) -> None:
        self.left: dict[int, list[int]] = {}

    def submit(self, step: int, samples: Batch) -> int:
        self.left[step] = sorted(samples.ids, key=lambda g: (g % 2 == 0, g))
        return step

    async def collect(self, step: int, k: int) -> Batch:
        await asyncio.sleep(0.01)
        mine, self.left[step] = self.left[step][:k], self.left[step][k:]
        rows = [g for g in sorted(mine) for _ in range(N)]
        return Batch(rows, {"score": [float(g) for g in rows]})


@stage(writes="responses", on="gpu")
def rollout(prompts, weights: Carried, *, engine, task):
    assert engine.version == (weights or 0)
    task.log({"version": engine.version, "lag": task.step - 1 - engine.version})
    return engine.generate(prompts)


@stage(writes="ticket", on="controller")
def reward_request(responses, *, agent, task):
    return agent.submit(task.step, responses)


@stage(writes="rewards", on="reward", role="collects")
async def reward_collect(ticket, *, agent, task):
    batch = await agent.collect(ticket, task.take)
    now = clock.now()
    task.mark("reward", now - 0.001, now, group=batch.ids[0])
    return batch


@stage(writes=("advantages", "note"), on="controller", splittable=True)
def advantage(responses, rewards):
    assert responses.ids == rewards.ids
    return rewards.like(advantages=[s - 1 for s in rewards["score"]]), {"plain": rewards.ids}


@stage(writes="report", on="controller")
def gathered(rewards, responses):
    # All parts of the step, joined and in order of the groups.
    assert rewards.ids == responses.ids == tuple(range(GROUPS))
    return sum(rewards["score"])


@stage(writes="actor", on="gpu", per_mini_batch=True)
def update(responses, advantages, note, actor: Latest, *, trainer, task):
    assert responses.ids == advantages.ids
    assert note["plain"]
    assert 0 <= task.step - 1 - responses.meta["weights_version"] <= task.max_staleness
    trainer.update(advantages)
    return task.step


@stage(writes="weights", on="gpu")
def sync(actor, *, engine, task):
    assert actor == task.step
    engine.version = actor
    return actor


@stage(on="io")
async def silent(responses):
    await asyncio.sleep(0)


def pipeline(**options) -> Pipeline:
    engine = Hosted("engine", Engine)
    agent = Hosted("agent", Agent, concurrent=True)
    stages = [
        rollout.bind(engine=engine),
        reward_request.bind(agent=agent),
        reward_collect.bind(agent=agent),
        advantage,
        gathered,
        update.bind(trainer=Hosted("trainer", Trainer)),
        sync.bind(engine=engine),
        silent,
    ]
    return Pipeline(stages, inputs=["prompts"], **options)


def prompts(step: int) -> Batch:
    return Batch(range(GROUPS), {"question": [f"{step}/{g}" for g in range(GROUPS)]})


@pytest.fixture(params=["inline", pytest.param("ray", marks=pytest.mark.heavy)])
def executor(request):
    if request.param == "inline":
        from dataflow.executors.inline import InlineExecutor

        return InlineExecutor()
    request.getfixturevalue("local_ray")
    from dataflow.executors.ray import RayExecutor

    return RayExecutor(num_cpus=2)


def run(executor, graph, asking=(), prompts=lambda step: step, **more):
    """Runs a graph to its end and closes the executor; returns the runner and what was asked of the tools."""
    trace = Trace(meta={"resources": dict(graph.pipeline.resources)})
    runner = Runner(graph, executor, inputs={"prompts": prompts}, trace=trace, **more)

    async def main():
        try:
            await executor.open(graph.pipeline)
            await asyncio.wait_for(runner.run(), 60)
            return [await executor.ask(host, method) for host, method in asking]
        finally:
            await executor.close()

    return runner, asyncio.run(main())


@pytest.mark.parametrize(
    ("executor", "policy"),
    [
        ("inline", preset("both", 4)),
        ("inline", SchedulingPolicy(2, 3)),
        pytest.param("ray", preset("both", 4), marks=pytest.mark.heavy),
    ],
    indirect=["executor"],
)
def test_a_pipeline_runs_to_its_end(executor, policy):
    steps = 5
    graph = expand(pipeline(), policy, steps, 4, groups=GROUPS)
    told: dict[int, dict[str, float]] = {}
    runner, (trained,) = run(executor, graph, [("trainer", "digest")], prompts, on_step=told.__setitem__)
    check_trace(runner.trace, graph, tolerance=0.005, busy=False)
    assert len(trained) == 4 * steps
    for step in range(steps):
        groups = [g for ids in trained[4 * step : 4 * step + 4] for g in ids]
        assert sorted(groups) == list(range(GROUPS))
        if policy.split == 4:
            assert groups == [1, 3, 5, 7, 0, 2, 4, 6]  # in order of arrival
    assert {s: told[s]["lag"] for s in told} == {s: min(s - 1, policy.max_staleness) for s in range(1, steps + 1)}
    facts = {s.task: s.args for s in runner.trace.spans}
    assert facts["rollout[5]"] == {"samples": GROUPS * N, "weights_version": 4 - policy.max_staleness}
    assert len(runner.trace.marks) == steps * policy.split
    assert runner.trace.marks[0].args == {"step": 1, "part": 0, "group": 1}


@pytest.mark.parametrize(
    ("executor", "staleness"),
    [("inline", 0), ("inline", 2)],
    indirect=["executor"],
)
def test_a_run_goes_on_from_restored_values(executor, staleness):
    step, steps, policy = 3, 6, SchedulingPolicy(4, staleness)
    late = range(step + 1, step + staleness + 1)
    # What the first steps left: the states, and the samples that were drawn before the sync of the last of them.
    samples = {}
    for at in late:
        rows = prompts(at).repeat(N)
        version = max(0, at - 1 - staleness)
        samples["responses", at] = Batch(rows.groups, {"version": [version] * len(rows)}, {"weights_version": version})
    stages = [
        # The engine as it is after the sync of that step.
        s.bind(engine=Hosted("engine", Engine, {"first": step})) if "engine" in s.services else s
        for s in pipeline().stages
    ]
    graph = expand(Pipeline(stages, inputs=["prompts"]), policy, steps, 4, groups=GROUPS, first=step + 1)
    restored = Restored({"actor": step, "weights": step}, samples)
    runner, (trained,) = run(executor, graph, [("trainer", "digest")], prompts, restored=restored)
    assert len(trained) == 4 * (steps - step), "no step is trained again, and none is left out"
    drawn = [s.step for s in runner.trace.spans if s.stage == "rollout"]
    assert drawn == list(range(step + staleness + 1, steps + 1)), "what was drawn before is not drawn again"


# --- failures ---------------------------------------------------------------------------------------------------


class Tool:
    async def answer(self) -> int:
        return 3


class TwoArguments(Exception):
    """One that can be pickled and not be read again."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


class Locked(Exception):
    """One that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("locked")
        self.lock = threading.Lock()


def chained():
    error = RunError("the call failed")
    error.__cause__ = TwoArguments(1, 2)
    return error


RAISED = {
    "ValueError: a bad batch": lambda: ValueError("a bad batch"),
    "SystemExit: 3": lambda: SystemExit(3),
    "CancelledError": asyncio.CancelledError,
    "StopIteration": StopIteration,
    "TwoArguments: 1 and 2": lambda: TwoArguments(1, 2),
    "locked": Locked,
    "the call failed": chained,
    "ValueError: xxx": lambda: ValueError("x" * 10_000_000),
}


@stage(writes="out", on="gpu")
def fine(prompts): ...


@stage(writes="number", on="gpu")
def now(out, *, what, tool):
    raise RAISED[what]()


@stage(writes="number", on="gpu")
async def later(out, *, what, tool):
    await asyncio.sleep(0)
    raise RAISED[what]()


@pytest.mark.parametrize("stage_", [now, later], ids=["plain", "async"])
def test_what_a_stage_raises_ends_the_run_with_its_story_and_no_process(executor, stage_):
    async def main():
        try:
            for what in RAISED:
                failing = stage_.bind(what=what, tool=Hosted("tool", Tool, concurrent=True))
                graph = expand(Pipeline([fine, failing], inputs=["prompts"]), SchedulingPolicy(), 1)
                await executor.open(graph.pipeline)
                with pytest.raises(StageFailed) as error:
                    await Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace()).run()
                first, history = str(error.value).splitlines()[0], str(error.value).splitlines()[-1]
                assert re.match(rf"{stage_.name}\[step 1\] failed on 'gpu' after \d+\.\d s: ", first)
                assert what in first
                assert history == "  history: waiting -> ready (fine[1] done) -> running -> failed"
                assert await executor.ask("tool", "answer") == 3, "the tool's process is gone"
        finally:
            await executor.close()

    asyncio.run(main())


def three_values(out):
    return 1, 2, 3


def one_value(out):
    return 7


def divides(out):
    return 1 / 0


@pytest.mark.parametrize("executor", ["inline"], indirect=True)
@pytest.mark.parametrize(
    ("function", "writes", "words"),
    [
        (three_values, ("a", "b"), "stage 'three_values' writes a, b but its function returned 3 values; return a "),
        (one_value, ("a", "b"), "stage 'one_value' writes a, b but its function returned int; return a tuple."),
        (divides, "a", "ZeroDivisionError: division by zero (test_executors.py:"),
    ],
)
def test_a_wrong_result_and_the_line_that_raised_are_said(executor, function, writes, words):
    graph = expand(
        Pipeline([fine, stage(writes=writes, on="gpu")(function)], inputs=["prompts"]), SchedulingPolicy(), 1
    )
    with pytest.raises(StageFailed) as error:
        run(executor, graph)
    assert words in str(error.value)


async def waits_for_ever(prompts):
    await asyncio.get_running_loop().create_future()


def test_a_failure_and_an_interrupt_cancel_what_runs(executor):
    waiting = stage(writes="never", on="reward")(waits_for_ever)
    failing = now.bind(what="ValueError: a bad batch", tool=None)

    def running(*stages):
        graph = expand(Pipeline(stages, inputs=["prompts"]), SchedulingPolicy(), 2)
        return Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace()).run()

    async def main():
        await executor.open(Pipeline([waiting, fine, failing], inputs=["prompts"]))
        before = asyncio.all_tasks()
        with pytest.raises(StageFailed, match=r"now\[step 1\] failed"):
            await running(waiting, fine, failing)
        interrupted = asyncio.create_task(running(waiting))
        await asyncio.sleep(0.2)
        interrupted.cancel()
        with pytest.raises(asyncio.CancelledError):
            await interrupted
        if left := asyncio.all_tasks() - before:
            await asyncio.wait(left, timeout=10)
        assert asyncio.all_tasks() <= before, "something still waits for what was cancelled"
        await executor.close()

    asyncio.run(asyncio.wait_for(main(), 60))


# --- services ---------------------------------------------------------------------------------------------------


class Board:
    """Where stages meet, and which says when it is closed."""

    def __init__(self, path: str = "") -> None:
        self.path = path
        self.here: set[str] = set()

    async def close(self) -> None:
        with open(self.path, "w") as f:
            f.write("closed")


BOARD = Board()
"""Of the process of stages without a service."""


async def meets(prompts, *, me, board=BOARD):
    board.here.add(me)
    while len(board.here) < 2:
        await asyncio.sleep(0.01)


def use(prompts, *, service): ...


def test_async_stages_run_side_by_side_with_or_without_a_service_which_is_closed(executor, tmp_path):
    BOARD.here.clear()
    meet = stage(writes="met", on="reward")(meets)
    paths = {"path": str(tmp_path / "board")}, {"path": str(tmp_path / "alone")}
    board, alone = Hosted("board", Board, paths[0], concurrent=True), Hosted("alone", Board, paths[1])
    stages = [
        meet.bind(name=me, me=me, renamed={"met": me}, **({"board": board} if hosted else {}))
        for me, hosted in (("a", True), ("b", True), ("c", False), ("d", False))
    ]
    graph = expand(Pipeline([*stages, stage(on="gpu")(use).bind(service=alone)], ["prompts"]), SchedulingPolicy(), 1)
    runner, _ = run(executor, graph)
    assert len(runner.trace.spans) == 5
    assert [(tmp_path / name).read_text() for name in ("board", "alone")] == ["closed"] * 2


def no_service():
    raise ImportError("no such engine")


def test_a_service_that_cannot_be_built_is_named(executor):
    broken = stage(writes="x", on="gpu")(use).bind(service=Hosted("shaky", no_service))
    graph = expand(Pipeline([broken], inputs=["prompts"]), SchedulingPolicy(), 1)
    with pytest.raises(RunError, match="'shaky' could not be built: ImportError: no such engine") as error:
        run(executor, graph)
    assert isinstance(error.value.__cause__, ImportError)
