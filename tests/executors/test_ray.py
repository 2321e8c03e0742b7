"""Behaviour that only Ray has: ranks, refs, bytes, dead processes, functions sent to other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from dataflow.batch import Batch
from dataflow.errors import DataflowError, RunError, StageFailed
from dataflow.executors.ray import RayExecutor
from dataflow.executors.ray.actors import Actors
from dataflow.executors.ray.host import Place
from dataflow.executors.ray.nodes import Cluster
from dataflow.graph import Hosted, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand, preset
from dataflow.runner import Runner
from dataflow.system.frozen import DEATH_REASON
from dataflow.timeline.spans import Trace
from tests.rigs.logs import logged
from tests.rigs.processes import left

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(120),
    pytest.mark.shares_ray,
    pytest.mark.usefixtures("local_ray"),
]


@pytest.fixture
def executor():
    return RayExecutor(num_cpus=2)


def run(executor, stages, steps=1, prompts=lambda step: step, during=None, policy=None, **more):
    """Runs a pipeline; ``during`` is called with the executor when all is up."""
    graph = expand(Pipeline(stages, inputs=["prompts"]), policy or SchedulingPolicy(), steps, **more)
    runner = Runner(graph, executor, inputs={"prompts": prompts}, trace=Trace())

    async def main():
        try:
            await executor.open(graph.pipeline)
            if during is not None:
                await during(executor)
            await asyncio.wait_for(runner.run(), 60)
        finally:
            await executor.close()

    asyncio.run(main())
    return runner


class Process:
    """Says where it lives."""

    def __init__(self, path: str) -> None:
        self.path = path

    def facts(self) -> dict:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        return {"pid": os.getpid(), **{name: os.environ[name] for name in names}}

    def note(self) -> None:
        with open(f"{self.path}/{os.environ['RANK']}", "a") as f:
            f.write(f"{os.getpid()}\n")

    def close(self):
        from loguru import logger

        logger.warning("the last word of {}", os.environ["RANK"])


@stage(writes="out", on="gpu")
def meet(prompts, *, process):
    from loguru import logger

    process.note()
    logger.info("all is well")
    if os.environ["RANK"] == "0":
        logger.warning("step {} is odd", prompts)
    return process.facts()


@stage(writes="got", on="gpu")
def read(out, *, process):
    # The first rank's values count, and every rank is given them.
    assert out["RANK"] == "0"
    process.note()
    return out["RANK"]


def test_ranks_run_the_same_calls_with_their_own_environment_and_warn_in_the_log_of_the_run(executor, tmp_path):
    import ray

    trainer = Hosted("trainer", Process, {"path": str(tmp_path)}, ranks=2)
    facts = []

    async def ask(executor):
        facts.extend(await asyncio.gather(*(a.ask.remote("facts") for a in executor._hosts["trainer"].actors.handles)))

    with logged("INFO") as said:
        run(executor, [meet.bind(process=trainer), read.bind(process=trainer)], 2, during=ask)
    assert said == ["step 1 is odd", "step 2 is odd", "the last word of 0", "the last word of 1"]
    first, second = facts
    assert (first["RANK"], second["RANK"]) == ("0", "1")
    assert {f["WORLD_SIZE"] for f in facts} == {"2"}
    assert {f["OMP_NUM_THREADS"] for f in facts} == {"1"}
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert first["MASTER_ADDR"] == second["MASTER_ADDR"]
    pids = {f["pid"] for f in facts}
    assert len(pids) == 2
    assert os.getpid() not in pids
    for rank, fact in enumerate(facts):
        assert (tmp_path / str(rank)).read_text() == f"{fact['pid']}\n" * 4
    assert not left(pids, timeout=20)
    assert ray.is_initialized()  # it was there before


@stage(writes="responses", on="gpu")
def make(prompts):
    rows = prompts.repeat(8)
    return Batch(rows.groups, {"text": ["x" * 4096] * len(rows)}, {"weights_version": 0})


@stage(writes="rewards", on="reward", role="collects")
async def collect(responses, *, task):
    groups = range(task.part * task.take, (task.part + 1) * task.take)
    return responses.select(groups)


@stage(writes="actor", on="gpu", per_mini_batch=True)
def use(responses, rewards):
    assert len(responses) == len(rewards) == 16
    return len(responses["text"][0])


def test_values_travel_as_refs_and_none_is_read_by_the_controller(executor, monkeypatch):
    made, init = [], Batch.__init__

    def counted(self, *args, **options):
        made.append(self)
        init(self, *args, **options)

    monkeypatch.setattr(Batch, "__init__", counted)
    steps, groups = 3, 8

    def prompts(step):
        return Batch(range(groups), {"prompt_ids": [[1, 2, 3]] * groups})

    stages, policy = [make, collect, use], SchedulingPolicy(4, 1)
    runner = run(executor, stages, steps, prompts, policy=policy, mini_batches=4, groups=groups)
    assert len(runner.trace.spans) == steps * 9
    assert len(made) == steps, "the prompts alone"


# --- deaths -----------------------------------------------------------------------------------------------------


class Victim:
    def pid(self) -> int:
        return os.getpid()


@stage(writes="out", on="gpu")
def hang(prompts, *, victim):
    time.sleep(300)


def test_a_killed_rank_fails_its_task_and_nothing_hangs(executor):
    victim = Hosted("victim", Victim, ranks=2)
    pids = []

    async def kill_soon(executor):
        pids.extend(await asyncio.gather(*(a.ask.remote("pid") for a in executor._hosts["victim"].actors.handles)))
        threading.Timer(0.5, os.kill, (pids[1], signal.SIGKILL)).start()

    with pytest.raises(StageFailed) as error:
        run(executor, [hang.bind(victim=victim)], during=kill_soon)
    text = str(error.value)
    assert text.startswith("hang[step 1] failed on 'gpu' after ")
    assert "the process that ran it died (killed, or out of memory)" in text
    assert isinstance(error.value.__cause__, RunError)
    assert not left(pids, timeout=20)


class Mortal:
    """Ends the second rank during a call as if it had frozen, in its first life only."""

    def __init__(self, journal: str) -> None:
        self.journal = journal
        with open(journal, "a") as f:
            f.write(f"{os.getpid()}\n")

    def work(self) -> int:
        with open(self.journal) as f:
            first_life = len(f.readlines()) == 2
        if first_life and os.environ["RANK"] == "1":
            Path(os.environ[DEATH_REASON]).write_text("its function blocked it.\nTimeout (0:00:02)!\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if first_life:
            time.sleep(300)
        return 7


@stage(writes="out", on="gpu")
def work(prompts, *, service):
    assert service.work() == 7


def test_all_ranks_of_a_service_are_rebuilt_and_a_freeze_is_told(executor, tmp_path):
    journal = tmp_path / "journal"
    service = Hosted("service", Mortal, {"journal": str(journal)}, ranks=2, restarts=1)
    with logged() as said:
        runner = run(executor, [work.bind(service=service)])
    assert any(line.startswith("'service' froze; its threads were at:\nTimeout") for line in said)
    assert any(line.startswith("'service' died (its function blocked it): restart 1 of 1") for line in said)
    assert [span.args.get("restarted") for span in runner.trace.spans] == [1]
    pids = [int(line) for line in journal.read_text().split()]
    assert len(set(pids)) == 4
    assert not left(pids, timeout=20)


def test_why_a_process_on_another_node_froze_is_in_the_directory_of_the_run(tmp_path):
    actors = Actors(Hosted("agent", dict, run_directory=True), 1, Cluster("here", directory=str(tmp_path)))
    actors._places = [Place("there", "10.0.0.2", 1)]
    path = Path(actors._environment(0)[DEATH_REASON])
    assert path.parent == tmp_path
    path.write_text("its function blocked it.\nTimeout (0:00:02)!\n")
    assert (actors.death_reason(), actors.freezes, path.exists()) == ("its function blocked it.", 1, False)


# --- calls ------------------------------------------------------------------------------------------------------


class Computing:
    """Knows whether a function of its own is at work."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.at_work = False

    def compute(self) -> None:
        self.at_work = True
        self.began.set()
        time.sleep(1)
        self.at_work = False

    async def wait(self) -> None:
        await asyncio.to_thread(self.began.wait)

    async def settle(self) -> None: ...


@stage(on="gpu")
def computes(prompts, *, service):
    service.compute()


@stage(on="io")
async def saves(prompts, *, service):
    assert not service.at_work


def test_nothing_runs_beside_the_function_of_a_cancelled_call(executor):
    service = Hosted("computing", Computing, concurrent=True)
    pipelines = [Pipeline([s.bind(service=service)], inputs=["prompts"]) for s in (computes, saves)]

    def runner(pipeline):
        graph = expand(pipeline, SchedulingPolicy(), 1)
        return Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace())

    async def main():
        try:
            for pipeline in pipelines:
                await executor.open(pipeline)
            running = asyncio.create_task(runner(pipelines[0]).run())
            await executor.ask("computing", "wait")
            running.cancel()
            await asyncio.wait([running])
            await executor.ask("computing", "settle")
            await runner(pipelines[1]).run()
        finally:
            await executor.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@stage(writes="responses", on="gpu", streams=True)
async def stream(prompts, *, victim): ...


@stage(writes="ticket", on="controller", per_chunk=True)
def follow(responses): ...


def test_a_service_that_runs_one_call_at_a_time_cannot_stream(executor):
    stages, policy = [stream.bind(victim=Hosted("engine", Victim)), follow], preset("baseline+stream", 1)
    with pytest.raises(DataflowError, match=r"'engine' runs one call at a time; give Hosted\(concurrent=True\)"):
        run(executor, stages, policy=policy, groups=2)
