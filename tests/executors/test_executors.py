"""The same behaviour of every executor: inline in this process, ray in processes of its own."""

from __future__ import annotations

import asyncio
import re
import threading
import time
import uuid

import pytest

from dataflow.batch import Batch
from dataflow.errors import DataflowError, PipelineError, RunError, StageFailed
from dataflow.graph import Carried, Hosted, Latest, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand, preset
from dataflow.runner import Restored, Runner
from dataflow.system import clock
from dataflow.testing import check_trace
from dataflow.timeline.spans import Trace

pytestmark = pytest.mark.shares_ray

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
        self.most = self.now = 0

    def submit(self, step: int, samples: Batch) -> int:
        self.left[step] = sorted(samples.ids, key=lambda g: (g % 2 == 0, g))
        return step

    async def collect(self, step: int, k: int) -> Batch:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        mine, self.left[step] = self.left[step][:k], self.left[step][k:]
        rows = [g for g in sorted(mine) for _ in range(N)]
        return Batch(rows, {"score": [float(g) for g in rows]})

    async def side_by_side(self) -> int:
        return self.most


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


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "policy",
    [preset("both", 4), SchedulingPolicy(2, 3)],
    ids=["both", "2-3"],
)
def test_a_pipeline_runs_to_its_end(executor, policy):
    steps = 5
    graph = expand(pipeline(), policy, steps, 4, groups=GROUPS)
    told: dict[int, dict[str, float]] = {}
    runner, (trained, most) = run(
        executor,
        graph,
        [("trainer", "digest"), ("agent", "side_by_side")],
        prompts,
        on_step=told.__setitem__,
    )
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
    part = {"part": 0} if policy.split > 1 else {}
    assert runner.trace.marks[0].args == {"step": 1, **part, "group": 1 if policy.split > 1 else 0}
    assert most >= 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("staleness", [0, 1, 2])
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


@stage(writes="out", on="gpu")
def fine(prompts): ...


def failing(fn, on="gpu", writes="bad", **bind):
    return stage(writes=writes, on=on)(fn).bind(**bind)


def broken(out, *, task):
    raise ZeroDivisionError(f"step {task.step} broke")


async def broken_later(out):
    await asyncio.sleep(0.01)
    raise KeyError("gone")


def gives_three(out):
    return 1, 2, 3


def gives_one(out):
    return 7


class Odd(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")
        self.lock = threading.Lock()


def broken_oddly(out):
    raise Odd("this", "that")


FAILURES = {
    "raises": (failing(broken), ZeroDivisionError, "ZeroDivisionError: step 1 broke"),
    "raises while it waits": (failing(broken_later, on="reward"), KeyError, "KeyError: 'gone'"),
    "raises what cannot travel": (failing(broken_oddly), Exception, "this and that"),
    "too many values": (
        failing(gives_three, writes=("a", "b")),
        DataflowError,
        "stage 'gives_three' writes a, b but its function returned 3 values; return a tuple.",
    ),
    "no tuple": (
        failing(gives_one, writes=("a", "b")),
        DataflowError,
        "stage 'gives_one' writes a, b but its function returned int; return a tuple.",
    ),
}


@pytest.mark.parametrize(
    ("executor", "cases"),
    [
        *(("inline", [case]) for case in FAILURES),
        # One service for all; what a function returns is checked in one place for all executors.
        pytest.param("ray", [case for case in FAILURES if "raises" in case], marks=pytest.mark.heavy),
    ],
    indirect=["executor"],
)
def test_a_task_that_fails_ends_the_run_with_its_story(executor, cases):
    async def main():
        try:
            for case in cases:
                stage_, _kind, _message = FAILURES[case]
                graph = expand(Pipeline([fine, stage_], inputs=["prompts"]), SchedulingPolicy(), 1)
                await executor.open(graph.pipeline)
                with pytest.raises(StageFailed) as error:
                    await Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace()).run()
                check_story(error, *FAILURES[case])
        finally:
            await executor.close()

    asyncio.run(main())


def check_story(error, stage_, kind, message):
    first, history = str(error.value).splitlines()[0], str(error.value).splitlines()[-1]
    assert re.match(rf"{stage_.name}\[step 1\] failed on '{stage_.on}' after \d+\.\d s: ", first)
    assert message in str(error.value)
    assert history == "  history: waiting -> ready (fine[1] done) -> running -> failed"
    assert isinstance(error.value.__cause__, kind)


async def waits_for_ever(prompts):
    await asyncio.get_running_loop().create_future()


@pytest.mark.timeout(60)
def test_a_failure_cancels_what_else_runs(executor):
    waiting = stage(writes="never", on="reward")(waits_for_ever)
    graph = expand(Pipeline([waiting, fine, failing(broken)], inputs=["prompts"]), SchedulingPolicy(), 2)

    async def main():
        await executor.open(graph.pipeline)
        before = asyncio.all_tasks()
        with pytest.raises(StageFailed, match=r"broken\[step 1\] failed"):
            await Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace()).run()
        await nothing_waits_but(before)
        await executor.close()

    began = time.monotonic()
    asyncio.run(main())
    assert time.monotonic() - began < 30


async def nothing_waits_but(before):
    """Asserts that all tasks of the event loop are over that have begun since."""
    if left := asyncio.all_tasks() - before:
        await asyncio.wait(left, timeout=10)
    assert asyncio.all_tasks() <= before, "something still waits for what was cancelled"


@pytest.mark.timeout(60)
def test_an_interrupt_cancels_what_runs(executor):
    waiting = stage(writes="never", on="reward")(waits_for_ever)
    graph = expand(Pipeline([waiting], inputs=["prompts"]), SchedulingPolicy(), 2)

    async def main():
        await executor.open(graph.pipeline)
        before = asyncio.all_tasks()
        runner = Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace())
        running = asyncio.create_task(runner.run())
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await nothing_waits_but(before)
        await executor.close()

    asyncio.run(main())


async def meets(prompts, *, board, me, other):
    board.here.add(me)
    while other not in board.here:
        await asyncio.sleep(0)
    return me


class Board:
    def __init__(self) -> None:
        self.here: set[str] = set()


@pytest.mark.timeout(60)
def test_async_tools_run_side_by_side(executor):
    board = Hosted("board", Board, concurrent=True)
    a = stage(writes="a", on="reward")(meets).bind(name="a", board=board, me="a", other="b")
    b = stage(writes="b", on="reward")(meets).bind(name="b", board=board, me="b", other="a")
    graph = expand(Pipeline([a, b], inputs=["prompts"]), SchedulingPolicy(), 2)
    runner, _ = run(executor, graph)
    assert len(runner.trace.spans) == 4


ROOMS: dict[str, set[int]] = {}


async def gathers(prompts, *, room, me, others):
    here = ROOMS.setdefault(room, set())
    here.add(me)
    while len(here) < others:
        await asyncio.sleep(0.01)
    return len(here)


@pytest.mark.timeout(60)
def test_async_stages_without_a_tool_run_side_by_side(executor):
    room = uuid.uuid4().hex
    stages = [
        stage(writes=f"f{i}", on="reward")(gathers).bind(name=f"s{i}", room=room, me=i, others=6) for i in range(6)
    ]
    graph = expand(Pipeline(stages, inputs=["prompts"]), SchedulingPolicy(), 1)
    runner, _ = run(executor, graph)
    assert len(runner.trace.spans) == 6


def too_few(prompts):
    return Batch([0], {"score": [1.0]})


@pytest.mark.timeout(60)
def test_a_stage_that_forms_parts_delivers_as_many_groups_as_asked(executor):
    collect = stage(writes="rewards", on="reward", role="collects")(too_few)
    graph = expand(Pipeline([collect], inputs=["prompts"]), SchedulingPolicy(2), 1, 2, groups=8)
    with pytest.raises(StageFailed, match=r"stage 'too_few' was to deliver 4 groups \(task.take\), not 1"):
        run(executor, graph)


def no_service():
    raise ImportError("no such engine")


def use(prompts, *, service): ...


@pytest.mark.timeout(60)
def test_a_tool_that_cannot_be_built_is_named(executor):
    broken_service = stage(writes="x", on="gpu")(use).bind(service=Hosted("shaky", no_service))
    graph = expand(Pipeline([broken_service], inputs=["prompts"]), SchedulingPolicy(), 1)
    with pytest.raises(RunError, match="'shaky' could not be built: ImportError: no such engine") as error:
        run(executor, graph)
    assert isinstance(error.value.__cause__, ImportError)


class Closing:
    def __init__(self, path: str) -> None:
        self.path = path

    async def close(self) -> None:
        with open(self.path, "w") as f:
            f.write("closed")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("concurrent", [True, False])
def test_tools_are_closed(executor, tmp_path, concurrent):
    service = Hosted("closing", Closing, {"path": str(tmp_path / "closed")}, concurrent=concurrent)
    one = stage(writes="x", on="gpu")(use).bind(service=service)
    graph = expand(Pipeline([one], ["prompts"]), SchedulingPolicy(), 1)
    run(executor, graph)
    assert (tmp_path / "closed").read_text() == "closed"


def test_inline_has_one_process():
    from dataflow.executors.inline import InlineExecutor

    two = stage(writes="x", on="gpu")(use).bind(service=Hosted("trainer", dict, ranks=2))
    graph = expand(Pipeline([two], inputs=["prompts"]), SchedulingPolicy(), 1)
    with pytest.raises(PipelineError, match="'trainer' needs 2 processes, but executor=inline has one"):
        run(InlineExecutor(), graph)


def test_virtual_refuses_what_it_cannot_do():
    from dataflow.executors.virtual import Costs, End, VirtualExecutor

    class Back(Costs):
        def start(self, task, groups, now):
            return End(now - 1.0)

    graph = expand(Pipeline([fine], inputs=["prompts"]), SchedulingPolicy(), 1)
    with pytest.raises(DataflowError, match=r"fine\[1\] started at 0.0.* begins at 0.0 and ends at -1.0"):
        run(VirtualExecutor(Back()), graph)
    with pytest.raises(DataflowError, match=r"there are no services, so 'trainer.digest' cannot be called"):
        asyncio.run(VirtualExecutor(Back()).ask("trainer", "digest"))


@stage(writes="share", on="controller")
def divides(prompts):
    return 1 / (prompts - prompts)


@pytest.mark.parametrize("executor", ["inline"], indirect=True)
def test_a_task_that_fails_names_the_line_of_its_file(executor):
    graph = expand(Pipeline([divides], inputs=["prompts"]), SchedulingPolicy(), 1)

    async def main():
        try:
            await executor.open(graph.pipeline)
            with pytest.raises(StageFailed) as error:
                await Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace()).run()
            line = divides.fn.__code__.co_firstlineno + 2
            assert f": ZeroDivisionError: division by zero (test_executors.py:{line})\n" in str(error.value)
        finally:
            await executor.close()

    asyncio.run(main())
