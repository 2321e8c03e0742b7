"""Services get the GPUs they need. Ray assigns GPUs by count, so no real one is needed."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataflow.engines import choice
from dataflow.errors import ConfigError
from dataflow.executors.ray import RayExecutor
from dataflow.executors.ray.nodes import Places
from dataflow.executors.ray.replicas import start
from dataflow.graph import Hosted, Pipeline, stage
from pipelines import gsm8k_grpo

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(120),
    pytest.mark.shares_ray,
    pytest.mark.usefixtures("local_ray"),
]


class Process:
    """Returns the GPUs that Ray assigned to it, and writes when it is built, and for how long.

    Args:
        log: a file with a line for each begin and each end.
        name: in that file.
    """

    def __init__(self, log: str, name: str) -> None:
        for word in ("begins", "ends"):
            with open(log, "a") as file:
                file.write(f"{name} {word}\n")
            time.sleep(0.3 if word == "begins" else 0)

    def gpus(self) -> list[str]:
        return os.environ["CUDA_VISIBLE_DEVICES"].split(",")

    def pid(self) -> int:
        return os.getpid()


@stage(writes="out", on="gpu")
def work(prompts, *, process): ...


def processes(hosts: dict[str, Hosted], log: Path) -> Pipeline:
    """A pipeline of these hosts, those on GPUs, with a process in place of each engine."""
    stages = [
        work.bind(
            name=name,
            renamed={"out": name},
            process=replace(spec, factory=Process, options={"log": str(log), "name": name}),
        )
        for name, spec in hosts.items()
        if spec.gpus
    ]
    return Pipeline(stages, inputs=["prompts"])


def test_an_engine_over_several_gpus_shares_them_with_the_ranks_and_is_rebuilt_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "vllm_device", lambda: "cuda")
    config = gsm8k_grpo.Config.model_validate(
        {
            "ray": {"gpus_per_worker": 1.0},
            "trainer": {"world_size": 2},
            "model": {"path": "x"},
            "engine": {"rollout": "vllm", "tensor_parallel": 2},
        }
    )
    hosts = gsm8k_grpo.pipeline(config).hosts()
    assert hosts["trainer"].options["device"] == hosts["rollout"].options["device"] == "cuda"
    # The engine is named first, but the ranks, which take more of each GPU, are placed first.
    pipeline, log = (
        processes({name: hosts[name] for name in ("rollout", "trainer")}, tmp_path / "log"),
        tmp_path / "log",
    )

    async def body() -> None:
        executor = RayExecutor(num_cpus=2)
        try:
            await executor.open(pipeline)
            ranks = [await actor.ask.remote("gpus") for actor in executor._hosts["trainer"].actors.handles]
            assert sorted(ranks) == [["0"], ["1"]]
            pid = await executor.ask("rollout", "pid")
            os.kill(pid, signal.SIGKILL)
            assert sorted(await executor.ask("rollout", "gpus")) == ["0", "1"]
            assert await executor.ask("rollout", "pid") != pid
        finally:
            await executor.close()

    asyncio.run(body())
    # It measures free memory, so nothing else on its GPUs is built at that time.
    assert log.read_text().splitlines()[:2] == ["rollout begins", "rollout ends"]


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
    async def body() -> None:
        executor = RayExecutor(num_cpus=2)
        try:
            await executor.open(
                processes({"rollout": Hosted("rollout", Process, gpus=0.3, devices=2)}, tmp_path / "log")
            )
        finally:
            await executor.close()

    with pytest.raises(ConfigError, match=r"2 shares of GPUs (0, 0|1, 1), .* give ray.gpus_per_worker=1"):
        asyncio.run(body())
    with pytest.raises(ConfigError, match=r"1\.5 GPUs for a process: Ray shares one GPU, not several"):
        Places(1, 1.5)
