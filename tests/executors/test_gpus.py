"""Services request the GPUs they need. Ray assigns GPUs by count, so no real one is needed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from dataflow.engines import choice
from dataflow.engines.base import Sampling
from dataflow.engines.choice import vllm_device
from dataflow.errors import ConfigError, RunError
from dataflow.executors.ray import RayExecutor
from dataflow.executors.ray import executor as ray_executor
from dataflow.executors.ray.nodes import Places
from dataflow.executors.ray.replicas import start
from dataflow.graph import Hosted, Pipeline, stage
from dataflow.models.tiny import tiny_model
from pipelines import gsm8k_grpo

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(120),
    pytest.mark.shares_ray,
    pytest.mark.usefixtures("local_ray"),
]


class Process:
    """Returns the GPUs that Ray assigned to it, and writes them when it is built."""

    def __init__(self, log: str = os.devnull) -> None:
        with open(log, "a") as file:
            file.write(f"{self.gpus()}\n")

    def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def pid(self) -> int:
        return os.getpid()


@stage(writes="out", on="gpu")
def work(prompts, *, process):
    return process.gpus()


async def build(pipeline: Pipeline) -> None:
    executor = RayExecutor(num_cpus=2)
    try:
        await executor.open(pipeline)
    finally:
        await executor.close()


def shares(gpus_per_worker: float, ranks: int, **more: object) -> dict[str, Hosted]:
    """The hosts of the GSM8K pipeline."""
    config = gsm8k_grpo.Config.model_validate(
        {"ray": {"gpus_per_worker": gpus_per_worker}, "trainer": {"world_size": ranks}, "model": {"path": "x"}, **more}
    )
    hosts = gsm8k_grpo.pipeline(config).hosts()
    assert isinstance(gsm8k_grpo.pipeline(config).by_name["rollout"].services["sampling"], Sampling)
    return hosts


def test_each_rank_has_a_gpu_and_the_rollout_shares_one(tmp_path: Path) -> None:
    hosts = shares(1.0, ranks=2)
    assert hosts["trainer"].options["device"] == hosts["rollout"].options["device"] == "cuda"
    asyncio.run(build(processes(hosts, tmp_path)))
    assert sorted((tmp_path / "trainer").read_text().split()) == ["0", "1"]
    assert (tmp_path / "rollout").read_text().strip() in ("0", "1")


def processes(hosts: dict[str, Hosted], logs: Path) -> Pipeline:
    """A pipeline of these hosts, those on GPUs, with a process in place of each engine, and a log of each host."""
    stages = [
        work.bind(
            name=name,
            renamed={"out": name},
            process=replace(spec, factory=Process, options={"log": str(logs / name)}),
        )
        for name, spec in hosts.items()
        if spec.gpus
    ]
    return Pipeline(stages, inputs=["prompts"])


needs_vllm = pytest.mark.skipif(vllm_device() is None, reason="tensor parallel is vLLM's, which is not installed")


@needs_vllm
def test_an_engine_over_several_gpus_shares_them_with_the_ranks_and_is_rebuilt_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "vllm_device", lambda: "cuda")
    hosts = shares(1.0, ranks=2, engine={"rollout": "vllm", "tensor_parallel": 2})
    assert hosts["rollout"].options["tensor_parallel"] == 2
    # The engine is named first, but the ranks, which take more of each GPU, are placed first.
    pipeline = processes({name: hosts[name] for name in ("rollout", "trainer")}, tmp_path)

    async def body() -> None:
        executor = RayExecutor(num_cpus=2)
        try:
            await executor.open(pipeline)
            assert sorted((tmp_path / "trainer").read_text().split()) == ["0", "1"]
            pid = await executor.ask("rollout", "pid")
            os.kill(pid, signal.SIGKILL)
            assert sorted((await executor.ask("rollout", "gpus")).split(",")) == ["0", "1"]
            assert await executor.ask("rollout", "pid") != pid
        finally:
            await executor.close()

    asyncio.run(body())


def test_replicas_over_several_gpus_see_them(tmp_path: Path) -> None:
    seen = tmp_path / "seen"

    def engine(**_options: object) -> SimpleNamespace:
        seen.write_text(os.environ["CUDA_VISIBLE_DEVICES"])
        return SimpleNamespace(close=lambda: None)

    async def body() -> None:
        (one,), release = start(engine, {}, 1, gpus=0.6, devices=2)
        await one.close()
        release()

    asyncio.run(body())
    assert sorted(seen.read_text().split(",")) == ["0", "1"]


def test_shares_that_are_put_on_one_gpu_end_with_the_fix(tmp_path: Path) -> None:
    engine = Hosted("rollout", Process, gpus=0.3, devices=2)
    with pytest.raises(ConfigError, match=r"2 shares of GPUs (0, 0|1, 1), .* give ray.gpus_per_worker=1"):
        asyncio.run(build(processes({"rollout": engine}, tmp_path)))


def test_a_part_of_a_second_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1\.5 GPUs for a process: Ray shares one GPU, not several"):
        Places(1, 1.5)


def test_without_gpus_the_hosts_ask_for_none() -> None:
    hosts = shares(0.0, ranks=2)
    assert all(spec.gpus == 0 for spec in hosts.values())
    assert hosts["trainer"].options["device"] == hosts["rollout"].options["device"] == "cpu"


def test_more_gpus_than_there_are_end_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = work.bind(process=Hosted("trainer", Process, ranks=3, gpus=1.0))

    async def body() -> None:
        executor = RayExecutor(num_cpus=2)
        try:
            await executor.open(Pipeline([]))  # what every run has is up before the time is measured
            monkeypatch.setattr(ray_executor, "BUILD_DEADLINE_S", 5.0)
            await executor.open(Pipeline([greedy], inputs=["prompts"]))
        finally:
            await executor.close()

    with pytest.raises(RunError, match="not up after 5 s; it needs 3 GPUs, and the nodes can give it 2"):
        asyncio.run(body())


class Logged:
    """Writes when it is built, and for how long."""

    def __init__(self, name: str, log: str, seconds: float) -> None:
        for word in ("begins", "ends"):
            with open(log, "a") as file:
                file.write(f"{name} {word}\n")
            time.sleep(seconds if word == "begins" else 0)


def test_a_service_that_measures_free_memory_is_built_before_the_others_on_gpus(tmp_path: Path) -> None:
    log = tmp_path / "log"
    shared = [("trainer", 0.6, False), ("rollout", 0.3, True), ("judge", 0.1, False)]
    stages = [
        work.bind(
            name=name,
            renamed={"out": name},
            process=Hosted(name, Logged, {"name": name, "log": str(log), "seconds": 0.3}, gpus=gpus, alone=alone),
        )
        for name, gpus, alone in shared
    ]

    async def body() -> None:
        executor = RayExecutor(num_cpus=2)
        try:
            await executor.open(Pipeline(stages, inputs=["prompts"]))
        finally:
            await executor.close()

    asyncio.run(body())
    lines = log.read_text().splitlines()
    assert lines[:2] == ["rollout begins", "rollout ends"]
    assert sorted(lines[2:]) == ["judge begins", "judge ends", "trainer begins", "trainer ends"]


@needs_vllm
def test_vllm_over_several_shared_gpus_uses_processes_of_its_own() -> None:
    """In a placement group it would else start Ray actors of a whole GPU each, for which there is never room."""
    import ray

    class Asked(Exception):
        pass

    class Engine:
        def backend(self, model: str) -> str:
            from vllm.v1.engine.async_llm import AsyncLLM

            from dataflow.engines.vllm.engine import VllmRollout

            def asked(args: Any) -> Any:
                raise Asked(args.create_engine_config().parallel_config.distributed_executor_backend)

            AsyncLLM.from_engine_args = staticmethod(asked)
            try:
                VllmRollout(model, 8, 8, tensor_parallel=2)
            except RunError as error:
                return str(error.__cause__)
            return "it started"

    places = Places(1, 0.3, 2)
    try:
        engine = ray.remote(Engine).options(**places.options[0]).remote()
        assert ray.get(engine.backend.remote(str(tiny_model())), timeout=100) == "mp"
    finally:
        places.release()


def test_a_machine_without_gpus_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # the executor starts its own
    monkeypatch.setattr(ray_executor, "start_ray", mock.Mock())
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0})

    async def body() -> None:
        executor = RayExecutor(num_cpus=2)
        try:
            await executor.open(processes({"trainer": Hosted("trainer", Process, gpus=1.0)}, tmp_path))
        finally:
            await executor.close()

    with pytest.raises(ConfigError, match=r"ray\.gpus_per_worker: the run needs 1 GPU, and finds none"):
        asyncio.run(body())
