"""Services on a cluster of three Ray nodes: where they run, and what is rebuilt when a node is lost.

The nodes are on this machine and share its files; separate machines are tested by ``benchmarks/machines.py``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError, RunError, ServiceLost, StageFailed
from dataflow.executors.ray import RayExecutor
from dataflow.executors.ray.connection import joined, own_address
from dataflow.executors.ray.host import Host
from dataflow.graph import Hosted, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.rewards.models.served import ServedReward
from dataflow.runner import Runner
from dataflow.running.services import served_models
from dataflow.running.services.nodes import node_labels
from dataflow.running.services.served_models import ServedModels
from dataflow.timeline.spans import Trace
from tests.rigs.cluster import Nodes
from tests.rigs.logs import logged
from tests.rigs.stand_in_server import COMMAND

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(180)]


class Service:
    """Says where it is, and makes and takes values that live in the memory of its node.

    Args:
        log: each process adds the id of its node to this file.
    """

    def __init__(self, log: str) -> None:
        self.made, self.log = np.ones(1 << 18), log
        with open(log, "a") as file:
            file.write(f"{self.node()}\n")

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def directory(self) -> str:
        return os.getcwd()

    def end(self) -> None:
        """Ends its process the first time."""
        ended = Path(f"{self.log}.ended")
        if not ended.exists():
            ended.touch()
            os.kill(os.getpid(), signal.SIGKILL)


@stage(writes=("value", "made"), on="gpu")
def make(prompts: Any, *, maker: Service) -> tuple[Any, int]:
    return maker.made, len(maker.made)


@stage(writes="waited", on="gpu")
async def wait(made: int, *, taker: Service, gate: str) -> int:
    Path(gate, "running").touch()
    while not Path(gate, "open").exists():
        await asyncio.sleep(0.05)
    return made


@stage(writes="total", on="gpu")
async def take(value: Any, waited: int, *, taker: Service) -> float:
    assert len(value) == waited
    return float(value.sum())


def pipeline(gate: Path, maker: Mapping[str, Any] = {}, taker: Mapping[str, Any] = {}) -> Pipeline:
    first = Hosted("maker", Service, {"log": str(gate / "maker")}, **maker)
    second = Hosted("taker", Service, {"log": str(gate / "taker")}, concurrent=True, **taker)
    stages = [make.bind(maker=first), wait.bind(taker=second, gate=str(gate)), take.bind(taker=second)]
    return Pipeline(stages, inputs=["prompts"])


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        with joined(made.address):
            yield made
    finally:
        made.cluster.shutdown()


def roles(nodes: Nodes, gate: Path, service: str) -> list[str]:
    """The roles of the nodes that processes of a service were started on."""
    return sorted(nodes.named(node) for node in (gate / service).read_text().split())


def test_services_run_where_their_rules_say_and_are_rebuilt_there(nodes: Nodes, tmp_path: Path) -> None:
    rules = {"maker": {"role": "in(a,b)"}, "taker": {"role": "b"}}

    async def body() -> None:
        executor = RayExecutor(nodes.address, nodes=rules)
        try:
            await executor.open(pipeline(tmp_path, maker={"ranks": 2}, taker={"restarts": 1}))
            assert set(roles(nodes, tmp_path, "maker")) <= {"a", "b"}
            assert await executor.ask("taker", "directory") == os.getcwd()
            await executor.ask("taker", "end")
            assert roles(nodes, tmp_path, "taker") == ["b", "b"]
        finally:
            await executor.close()

    with logged("INFO") as said:
        asyncio.run(body())
    (address,) = {node["NodeManagerAddress"] for node in ray.nodes()}
    assert {f"'maker' runs on {address} x 2", f"'taker' runs on {address} x 1"} <= set(said)
    assert sum("'taker' died (killed, or out of memory): restart 1 of 1" in message for message in said) == 1


@pytest.mark.parametrize("shared", [True, False])
def test_a_service_with_files_in_the_runs_directory_runs_where_it_is_seen(
    nodes: Nodes, tmp_path: Path, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def blind(self: Host, path: str) -> bool:
        return False

    if not shared:  # the nodes are on one machine
        monkeypatch.setattr(Host, "sees", blind)
    rules, pipe = {"maker": {"role": "b"}}, pipeline(tmp_path, maker={"run_directory": True})

    async def body() -> None:
        executor = RayExecutor(nodes.address, nodes=rules, directory=str(tmp_path))
        try:
            await executor.open(pipe)
        finally:
            await executor.close()

    if shared:
        asyncio.run(body())
    else:
        with pytest.raises(ConfigError, match=rf"^runs={tmp_path}: node .*, where 'maker' runs, does not see this"):
            asyncio.run(body())
    assert not list(tmp_path.glob(".shared*")), "the marker is gone"


def test_a_label_that_no_node_has_is_said_at_once_and_ends_the_wait(nodes: Nodes, tmp_path: Path) -> None:
    async def body() -> None:
        executor = RayExecutor(nodes.address, nodes={"maker": {"role": "c"}}, deadline_s=2.0)
        try:
            await executor.open(pipeline(tmp_path))
        finally:
            await executor.close()

    with logged() as warned, pytest.raises(RunError) as caught:
        asyncio.run(body())
    lacking = "no node of the cluster has the label role=c."
    assert any(message.startswith(f"'maker' waits for nodes: {lacking}") for message in warned)
    assert str(caught.value) == f"'maker' was not up after 2 s; {lacking}"


def run_and_lose(
    nodes: Nodes, gate: Path, service: str, rules: dict[str, dict[str, str]], **options: Any
) -> dict[str, Any]:
    """Runs the pipeline, and loses the node of a service while the second stage waits.

    Returns:
        ``lost``, the role of that node; ``error`` of the run, or None; ``then``, the role of the node that the service
        is on afterwards, or the error of the question.
    """
    graph = expand(pipeline(gate, **options), SchedulingPolicy(), steps=1)
    found: dict[str, Any] = {"error": None}

    async def body() -> None:
        executor = RayExecutor(nodes.address, nodes=rules, deadline_s=60.0)
        try:
            await executor.open(graph.pipeline)
            run = asyncio.ensure_future(
                Runner(graph, executor, inputs={"prompts": lambda _step: [1]}, trace=Trace()).run()
            )
            while not (gate / "running").exists() and not run.done():
                await asyncio.sleep(0.05)
            (found["lost"],) = roles(nodes, gate, service)
            nodes.lose(found["lost"])
            (gate / "open").touch()
            try:
                await run
            except StageFailed as error:
                found["error"] = error
            try:
                found["then"] = nodes.named(await executor.ask(service, "node"))
            except ServiceLost as error:
                found["then"] = error
        finally:
            await executor.close()

    asyncio.run(body())
    return found


def test_what_a_lost_node_ran_is_rebuilt_on_another(nodes: Nodes, tmp_path: Path) -> None:
    rules = {"taker": {"role": "in(a,b)"}}
    with logged() as warned:
        found = run_and_lose(nodes, tmp_path, "taker", rules, maker={"here": True}, taker={"restarts": 1})
    assert found["error"] is None
    assert roles(nodes, tmp_path, "maker") == ["head"]
    assert sorted([found["lost"], found["then"]]) == ["a", "b"]
    (warning,) = [message for message in warned if "died" in message]
    assert "restart 1 of 1; rebuilding it, then running its tasks again" in warning


def test_a_service_and_a_value_that_are_gone_with_a_node_end_in_one_sentence_each(nodes: Nodes, tmp_path: Path) -> None:
    nodes.restore()
    rules = {"maker": {"role": "b"}, "taker": {"role": "a"}}
    found = run_and_lose(nodes, tmp_path, "maker", rules, taker={"restarts": 1})
    assert "a value that it needs is gone with the node that held it" in str(found["error"])
    assert isinstance(found["error"].__cause__, ServiceLost)  # the run resumes from its newest checkpoint
    assert "the process that ran it died" in str(found["then"])


def test_servers_of_a_reward_model_are_where_its_rule_says_behind_a_router_here(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.restore()
    words = ["env", f"PYTHONPATH={Path(__file__).parents[2]}", *COMMAND]
    monkeypatch.setattr(served_models, "serve_command", lambda *_model: words)
    (tmp_path / "model").mkdir()
    keys = ["ray.address=auto", "executor=ray", "reward.models.rm.replicas=2", "reward.models.rm.restarts=0"]
    keys += [f"reward.models.rm.path={tmp_path / 'model'}", "ray.nodes.rm.labels.role=b"]
    config, lost = parse_overrides(RunConfig, keys), list[RunError]()

    async def body() -> None:
        executor = RayExecutor(nodes.address, nodes=node_labels(config), directory=str(tmp_path))
        with ServedModels(config, tmp_path, lost.append, ["reward"]) as served:
            await executor.open(Pipeline([]), served.hosts)
            try:
                await served.open(executor)
                options = {**config.reward.models["rm"].client_options("rm"), "path": None}
                assert options["url"].startswith("http://127.0.0.1:")
                reward = ServedReward(**options)
                assert (await reward.compute_score("d", "xxx", "1", {"question": "q"}))["score"] == 3.0
                await reward.close()
                urls = [await executor.ask(server, "ready") for server in served.hosts]
                assert all(url.startswith(f"http://{own_address()}:") for url in urls)
                nodes.lose("b")
                async with asyncio.timeout(60):
                    while not lost:
                        await asyncio.sleep(0.1)
            finally:
                await served.close()
                await executor.close()

    with logged() as warned:
        asyncio.run(body())
    assert sum("the run goes on with 1 of its servers" in message for message in warned) == 1
    assert isinstance(lost[0], ServiceLost)  # the run resumes from its newest checkpoint, with servers elsewhere
