"""Behaviour that only Ray has: ranks, refs, bytes, dead processes, functions sent to other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location

import pytest
from loguru import logger

from dataflow.batch import Batch
from dataflow.errors import ConfigError, RunError, StageFailed
from dataflow.executors.ray import RayExecutor
from dataflow.graph import Hosted, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(120),
    pytest.mark.shares_ray,
    pytest.mark.usefixtures("local_ray"),
]


@pytest.fixture
def executor():
    return RayExecutor(num_cpus=2)


def run(executor, stages, steps=1, prompts=lambda step: step, during=None, asking=(), policy=None, **more):
    """Runs a pipeline; ``during`` is called with the executor when all is up."""
    graph = expand(Pipeline(stages, inputs=["prompts"]), policy or SchedulingPolicy(), steps, **more)
    runner = Runner(graph, executor, inputs={"prompts": prompts}, trace=Trace())

    async def main():
        try:
            await executor.open(graph.pipeline)
            if during is not None:
                await during(executor)
            await asyncio.wait_for(runner.run(), 60)
            return [await executor.ask(host, method) for host, method in asking]
        finally:
            await executor.close()

    return runner, asyncio.run(main())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as f:
        return f.read().rpartition(")")[2].split()[0] != "Z"


def gone(pids, deadline: float = 10.0) -> bool:
    end = time.monotonic() + deadline
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def test_what_an_actor_warns_of_is_in_the_log_of_the_run(executor):
    class Warner:
        def close(self):
            from loguru import logger

            logger.warning("the last word")

    @stage(writes="out", on="gpu")
    def warn(prompts, *, warner):
        from loguru import logger

        logger.info("all is well")
        logger.warning("step {} is odd", prompts)

    said = []
    number = logger.add(said.append, format="{message}", level="INFO")
    try:
        run(executor, [warn.bind(warner=Hosted("warner", Warner))], steps=2)
    finally:
        logger.remove(number)
    assert [line.strip() for line in said] == ["step 1 is odd", "step 2 is odd", "the last word"]


class Process:
    """Says where it lives."""

    def __init__(self, path: str = "") -> None:
        self.path = path

    def facts(self) -> dict:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
        return {"pid": os.getpid(), **{name: os.environ[name] for name in names}}

    def note(self) -> None:
        with open(f"{self.path}/{os.environ['RANK']}", "a") as f:
            f.write(f"{os.getpid()}\n")


@stage(writes="out", on="gpu")
def meet(prompts, *, process):
    process.note()
    return process.facts()


@stage(writes="got", on="gpu")
def read(out, *, process):
    # The first rank's values count, and every rank is given them.
    assert out["RANK"] == "0"
    process.note()
    return out["RANK"]


def test_ranks_run_the_same_calls_with_their_own_environment(executor, tmp_path):
    import ray

    trainer = Hosted("trainer", Process, {"path": str(tmp_path)}, ranks=2)
    facts = []

    async def ask(executor):
        facts.extend(await asyncio.gather(*(a.ask.remote("facts") for a in executor._hosts["trainer"])))

    run(executor, [meet.bind(process=trainer), read.bind(process=trainer)], 2, during=ask)
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
    assert gone(pids)
    assert ray.is_initialized()  # it was there before


ROWS, WIDE = 64, 4096


@stage(writes="responses", on="gpu")
def make(prompts):
    import torch

    rows = prompts.repeat(8)
    return Batch(rows.groups, {"logits": torch.zeros(len(rows), WIDE)}, {"weights_version": 0})


@stage(writes="rewards", on="reward", role="collects")
async def collect(responses, *, task):
    groups = range(task.part * task.take, (task.part + 1) * task.take)
    return responses.select(groups)


@stage(writes="actor", on="gpu", per_mini_batch=True)
def use(responses, rewards):
    assert len(responses) == len(rewards) == 16
    return float(responses["logits"].sum())


def test_inputs_that_the_object_store_does_not_take_are_a_sentence(executor, monkeypatch):
    import ray

    def put(value):
        raise ray.exceptions.ObjectStoreFullError("no room")

    monkeypatch.setattr(ray, "put", put)
    with pytest.raises(RunError, match=r"does not take the run's inputs: .*no room"):
        executor.put(b"x" * 1_000_000)


def test_values_travel_as_refs_and_none_is_read_by_the_controller(executor, monkeypatch):
    made, init = [], Batch.__init__

    def counted(self, *args, **options):
        made.append(self)
        init(self, *args, **options)

    monkeypatch.setattr(Batch, "__init__", counted)
    steps, groups = 3, 8
    policy = SchedulingPolicy(4, 1)

    def prompts(step):
        return Batch(range(groups), {"prompt_ids": [[1, 2, 3]] * groups})

    runner, _ = run(executor, [make, collect, use], steps, prompts, policy=policy, mini_batches=4, groups=groups)
    assert len(runner.trace.spans) == steps * 9
    assert len(made) == steps, "the prompts alone"


class Victim:
    def pid(self) -> int:
        return os.getpid()


@stage(writes="out", on="gpu")
def hang(prompts, *, victim):
    time.sleep(300)


@stage(writes="out", on="gpu")
def quick(prompts, *, victim):
    return 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_fails_its_task_and_nothing_hangs(executor, rank):
    victim = Hosted("victim", Victim, ranks=2)
    pids = []

    async def kill_soon(executor):
        pids.extend(await asyncio.gather(*(a.ask.remote("pid") for a in executor._hosts["victim"])))
        threading.Timer(0.5, os.kill, (pids[rank], signal.SIGKILL)).start()

    began = time.monotonic()
    with pytest.raises(StageFailed) as error:
        run(executor, [hang.bind(victim=victim)], during=kill_soon)
    assert time.monotonic() - began < 30
    text = str(error.value)
    assert text.startswith("hang[step 1] failed on 'gpu' after ")
    assert "the process that ran it died (killed, or out of memory)" in text
    assert text.endswith("history: waiting -> ready -> running -> failed")
    assert isinstance(error.value.__cause__, RunError)
    assert gone(pids)


def test_a_process_that_dies_while_idle_fails_the_next_task(executor):
    async def kill(executor):
        pid = await executor.ask("victim", "pid")
        os.kill(pid, signal.SIGKILL)
        assert gone([pid])

    with pytest.raises(StageFailed, match="the process that ran it died"):
        run(executor, [quick.bind(victim=Hosted("victim", Victim))], during=kill)


class Mortal:
    """Kills the second rank during a call, in its first life only."""

    def __init__(self, journal: str) -> None:
        self.journal = journal
        with open(journal, "a") as f:
            f.write(f"{os.getpid()}\n")

    def work(self) -> int:
        with open(self.journal) as f:
            first_life = len(f.readlines()) == 2
        if first_life and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        if first_life:
            time.sleep(300)
        return 7


@stage(writes="out", on="gpu")
def work(prompts, *, service):
    return service.work()


@stage(on="gpu")
def check_seven(out):
    assert out == 7


def test_all_ranks_of_a_service_are_rebuilt(executor, tmp_path):
    journal = tmp_path / "journal"
    service = Hosted("service", Mortal, {"journal": str(journal)}, ranks=2, restarts=1)
    runner, _ = run(executor, [work.bind(service=service), check_seven])
    assert [span.args.get("restarted") for span in runner.trace.spans] == [1, None]
    pids = [int(line) for line in journal.read_text().split()]
    assert len(set(pids)) == 4
    assert gone(pids)


class Computing:
    """Knows whether a function of its own is at work."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.at_work = False

    def compute(self) -> None:
        self.at_work = True
        self.began.set()
        time.sleep(2)
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


@stage(writes="broken", on="gpu")
def breaks(out, *, victim):
    raise ValueError("a bad batch")


def test_the_workers_traceback_is_behind_the_error(executor):
    victim = Hosted("victim", Victim)
    with pytest.raises(StageFailed, match="ValueError: a bad batch") as error:
        run(executor, [quick.bind(victim=victim), breaks.bind(victim=victim)])
    cause = error.value.__cause__
    assert type(cause) is ValueError
    assert 'raise ValueError("a bad batch")' in "".join(cause.__notes__)


def test_a_pipeline_loaded_by_path_travels_by_value(executor, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
        from dataflow.graph import Hosted, stage

        FACTOR = 3

        class Service:
            def times(self, x):
                return helper(x)

        def helper(x):
            return FACTOR * x

        @stage(writes="out", on="gpu")
        def mine(prompts, *, service):
            return service.times(prompts)

        @stage(writes="checked", on="gpu")
        def check(out):
            assert out == helper(1), out

        service = Hosted("mine", Service)
        stages = [mine.bind(service=service), check]
        """)
    )
    spec = spec_from_file_location("a_pipeline_of_mine", file)
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # as importlib's own recipe does: a worker cannot import that name
    try:
        spec.loader.exec_module(module)
        runner, _ = run(executor, module.stages)
    finally:
        del sys.modules[spec.name]
    assert len(runner.trace.spans) == 2


def test_a_program_of_its_own_leaves_no_process_behind(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, os, sys
        from dataflow import Hosted, Pipeline, SchedulingPolicy, expand, stage
        from dataflow.executors.ray import RayExecutor
        from dataflow.runner import Runner
        from dataflow.timeline.spans import Trace

        class Service:
            def pid(self):
                return os.getpid()

        @stage(writes="out", on="gpu")
        def mine(prompts, *, service):
            return service.pid()

        async def main():
            graph = expand(Pipeline([mine.bind(service=Hosted("t", Service))], ["prompts"]), SchedulingPolicy(), 2)
            executor = RayExecutor(num_cpus=1)
            try:
                await executor.open(graph.pipeline)
                await Runner(graph, executor, inputs={"prompts": lambda step: step}, trace=Trace()).run()
                import psutil
                print(*(p.pid for p in psutil.Process().children(recursive=True)))
            finally:
                await executor.close()

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) >= 3  # the head of the local Ray and its workers
    assert gone(pids)


@pytest.mark.parametrize(
    ("address", "why"), [("127.0.0.1:1", "no Ray cluster"), ("127.0.0.1:port", "it is not host:port; give auto")]
)
def test_no_cluster_at_an_address_is_one_sentence(address, why):
    program = (
        "import asyncio\n"
        "from dataflow.executors.ray import RayExecutor\n"
        "from dataflow.graph import Pipeline\n"
        f"asyncio.run(RayExecutor({address!r}).open(Pipeline([])))\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"{ConfigError.__module__}.{ConfigError.__name__}: ray.address={address}: {why}")
