"""The servers of a run, with stand-ins for vLLM: behind a router, restarted when they die, and what ends the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.run import RunConfig
from dataflow.errors import RunError
from dataflow.executors.inline import InlineExecutor
from dataflow.graph import Pipeline
from dataflow.rewards.models.served import ServedReward
from dataflow.running.services import served_models
from dataflow.running.services.served_models import ServedModels, model_hosts
from tests.rigs.processes import below, command, left
from tests.rigs.stand_in_server import COMMAND

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "serve_command", lambda *_model: COMMAND)


def config(*keys: str) -> RunConfig:
    return parse_overrides(RunConfig, ["name=a", "reward.models.rm.path=DIR", *keys])


def stand_ins(word: str = "stand_in_server") -> list[psutil.Process]:
    return [each for each in below() if word in " ".join(command(each))]


@asynccontextmanager
async def serving(found: RunConfig, place: Path, lost: list[RunError]) -> AsyncIterator[ServedModels]:
    executor = InlineExecutor()
    with ServedModels(found, place, lost.append) as served:
        await executor.open(Pipeline([]), served.hosts)
        try:
            await served.open(executor)
            yield served
        finally:
            await served.close()
            await executor.close()


async def scored(found: RunConfig, number: int) -> list[float]:
    """Returns the scores of responses of 1, 2, ... letters, as the agent would ask for them."""
    options = {**found.reward.models["rm"].client_options("rm"), "path": None}
    reward = ServedReward(**options)
    calls = (reward.compute_score("d", "x" * (at + 1), "7", {"question": "q"}) for at in range(number))
    columns = await asyncio.gather(*calls)
    await reward.close()
    return [each["score"] for each in columns]


def run(body: Any) -> None:
    async def limited() -> None:
        async with asyncio.timeout(90):
            await body

    before = set(below())
    asyncio.run(limited())
    assert left(set(below()) - before, timeout=5) == []


def test_two_servers_behind_a_router_lose_no_request_when_both_die(tmp_path: Path, warned: list[str]) -> None:
    found, lost = config("reward.models.rm.replicas=2"), list[RunError]()

    async def body() -> None:
        async with serving(found, tmp_path, lost):
            expected = [float(at + 1) for at in range(40)]
            assert await scored(found, 40) == expected
            for each in stand_ins():
                each.kill()
            assert await scored(found, 40) == expected
            for each in stand_ins("vllm_router") or stand_ins("vllm::router"):
                each.kill()
            assert await scored(found, 40) == expected

    run(body())
    assert lost == []
    assert sum("ended (killed, or out of memory): restart" in line for line in warned) == 3
    names = sorted(file.name for file in (tmp_path / "servers").iterdir())
    assert names == ["rm-0.log", "rm-1.log", "rm-router.log"]


def test_the_run_goes_on_with_the_servers_that_are_left_and_ends_without_any(tmp_path: Path, warned: list[str]) -> None:
    found, lost = config("reward.models.rm.replicas=2", "reward.models.rm.restarts=0"), list[RunError]()

    async def body() -> None:
        async with serving(found, tmp_path, lost):
            first, second = stand_ins()
            first.kill()
            assert await scored(found, 20) == [float(at + 1) for at in range(20)]
            assert lost == []
            second.kill()
            while not lost:
                await asyncio.sleep(0.01)

    run(body())
    assert sum("the run goes on with 1 of its servers" in line for line in warned) == 1
    assert "ended (killed, or out of memory), after 0 restarts (reward.models.rm.restarts=0); see" in str(lost[0])


def test_a_server_that_does_not_start_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "serve_command", lambda *_model: [*COMMAND, "--fails", "no such type"])

    async def body() -> None:
        with pytest.raises(RunError, match=r"^reward model 'rm': server 0 did not start \(ValueError: no such type\)"):
            async with serving(config(), tmp_path, []):
                raise AssertionError

    run(body())


def test_servers_elsewhere_get_a_router_and_one_of_them_none(tmp_path: Path) -> None:
    one = RunConfig.model_validate({"reward": {"models": {"rm": {"url": "http://h:1"}}}})
    with ServedModels(one, tmp_path, print) as served:
        assert one.reward.models["rm"].client_options("rm")["url"] == "http://h:1"
        assert served.hosts == {}
    two = RunConfig.model_validate({"reward": {"models": {"rm": {"url": ["http://h:1", "http://i:1"]}}}})
    with ServedModels(two, tmp_path, print):
        assert str(two.reward.models["rm"].base).startswith("http://127.0.0.1:")
        assert two.reward.models["rm"].each_server == ("http://h:1", "http://i:1")


def test_ray_gives_the_servers_their_gpus() -> None:
    models = {
        "own": {"path": "DIR", "replicas": 2, "tensor_parallel": 4},
        "a": {"path": "DIR", "placement": "colocated", "replicas": 2},
        "b": {"path": "DIR", "placement": "colocated"},
    }
    found = RunConfig.model_validate({"ray": {"gpus_per_worker": 1}, "reward": {"models": models}})
    hosts = model_hosts(found)
    assert list(hosts) == ["own-0", "own-1", "a-0", "a-1", "b-0"]
    assert [(host.gpus, host.devices) for host in hosts.values()][:2] == [(1.0, 4)] * 2
    a, b = hosts["a-0"].gpus, hosts["b-0"].gpus
    left = 1 - 0.85
    assert left / 2 < a < left, "no two of a model on one GPU"
    assert (left - a) / 2 < b < left - a
    assert [host.alone for host in hosts.values()] == [False, False, True, True, True]
    assert all(host.options["device"] == "cuda" for host in hosts.values())
    on_cpu = model_hosts(RunConfig.model_validate({"reward": {"models": {"rm": {"path": "DIR"}}}}))["rm-0"]
    assert (on_cpu.gpus, on_cpu.alone, on_cpu.here) == (0.0, False, True)
