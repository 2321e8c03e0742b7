"""That hosts ask Ray for the GPUs they need. Ray hands out GPUs by count, so a machine without any can show it."""

from __future__ import annotations

import asyncio
import os

import pytest

from dataflow.engines.base import Sampling
from dataflow.errors import RunError
from dataflow.executors import ray as ray_executor
from dataflow.executors.ray import RayExecutor
from dataflow.graph import Hosted, Pipeline, stage
from pipelines import gsm8k_grpo

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]


@pytest.fixture(scope="module", autouse=True)
def two_gpus():
    import ray

    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray.init(address="local", num_cpus=2, num_gpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


class Process:
    """Says which GPUs Ray gave it."""

    def gpus(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


@stage(writes="out", on="gpu")
def work(prompts, *, process):
    return process.gpus()


async def seen_by(pipeline: Pipeline) -> dict[str, list[str]]:
    executor = RayExecutor(num_cpus=2)
    try:
        await executor.open(pipeline)
        return {
            name: list(await asyncio.gather(*(actor.ask.remote("gpus") for actor in executor._hosts[name])))
            for name in pipeline.hosts()
        }
    finally:
        await executor.close()


def shares(gpus_per_worker: float, ranks: int) -> dict[str, Hosted]:
    """The hosts of the GSM8K pipeline, with a process in place of each engine."""
    config = gsm8k_grpo.Config.model_validate(
        {"ray": {"gpus_per_worker": gpus_per_worker}, "trainer": {"world_size": ranks}, "model": {"path": "x"}}
    )
    hosts = gsm8k_grpo.pipeline(config).hosts()
    assert isinstance(gsm8k_grpo.pipeline(config).by_name["rollout"].tools["sampling"], Sampling)
    return hosts


def test_each_rank_has_a_gpu_and_the_rollout_shares_one() -> None:
    hosts = shares(1.0, ranks=2)
    assert hosts["trainer"].options["device"] == hosts["rollout"].options["device"] == "cuda"
    stages = [
        work.bind(name=name, renamed={"out": name}, process=Hosted(name, Process, ranks=spec.ranks, gpus=spec.gpus))
        for name, spec in hosts.items()
        if spec.gpus
    ]
    seen = asyncio.run(seen_by(Pipeline(stages, inputs=["prompts"])))
    assert sorted(seen["trainer"]) == ["0", "1"]
    assert seen["rollout"][0] in ("0", "1")


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

    with pytest.raises(RunError, match="3 x 1 GPUs: does the cluster have them"):
        asyncio.run(body())
