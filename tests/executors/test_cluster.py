"""Services on a cluster of three Ray nodes: where they run, and what is rebuilt when a node is lost.

The nodes are on this machine and share its files, so what a node does not see is tested with stand-ins
(``test_shared_paths.py``), and separate machines by ``benchmarks/machines.py``.
"""

from __future__ import annotations

import asyncio
import os
import re
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
from dataflow.executors.ray.nodes import NodeRule
from dataflow.executors.ray.paths import SharedPaths
from dataflow.executors.ray.replicas import start
from dataflow.graph import Hosted, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.rewards.models.served import ServedReward
from dataflow.runner import Runner
from dataflow.running.services import served_models
from dataflow.running.services.nodes import node_rules
from dataflow.running.services.served_models import ServedModels
from dataflow.system.frozen import DEATH_REASON
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
        self.made = np.ones(1 << 18)
        with open(log, "a") as file:
            file.write(f"{self.node()}\n")

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def directory(self) -> str:
        return os.getcwd()

    def end(self, why: str) -> None:
        """Ends its process the first time, as if it had frozen."""
        path = Path(os.environ[DEATH_REASON])
        if not path.with_suffix(".ended").exists():
            path.with_suffix(".ended").touch()
            path.write_text(f"{why}\nTimeout (0:00:02)!\n")
            os.kill(os.getpid(), signal.SIGKILL)
        path.with_suffix(".ended").unlink()


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
    rules = {"maker": NodeRule({"role": "in(a,b)"}, "strict_spread"), "taker": NodeRule({"role": "b"})}

    async def body() -> None:
        executor = RayExecutor(nodes.address, nodes=rules)
        try:
            await executor.open(pipeline(tmp_path, maker={"ranks": 2}, taker={"restarts": 1}))
            assert roles(nodes, tmp_path, "maker") == ["a", "b"]
            assert await executor.ask("taker", "directory") == os.getcwd()
            await executor.ask("taker", "end", "its function blocked it; give it a time-out.")
            assert roles(nodes, tmp_path, "taker") == ["b", "b"]
        finally:
            await executor.close()

    with logged("INFO") as said:
        asyncio.run(body())
    (address,) = {node["NodeManagerAddress"] for node in ray.nodes()}
    a, b = (f"{address}: role={role}" for role in "ab")
    assert {f"'maker' runs on {a} x 1; {b} x 1", f"'maker' runs on {b} x 1; {a} x 1"} & set(said)
    assert f"'taker' runs on {b} x 1" in said
    assert [message for message in said if "died" in message] == [
        "'taker' died (its function blocked it; give it a time-out): restart 1 of 1; rebuilding it."
    ]


def test_a_label_that_no_node_has_is_said_at_once_and_ends_the_wait(nodes: Nodes, tmp_path: Path) -> None:
    async def body() -> None:
        executor = RayExecutor(nodes.address, nodes={"maker": NodeRule({"role": "c"})}, deadline_s=2.0)
        try:
            await executor.open(pipeline(tmp_path))
        finally:
            await executor.close()

    with logged() as warned, pytest.raises(RunError) as caught:
        asyncio.run(body())
    lacking = "no node of the cluster has the label role=c (it has"
    assert any(message.startswith(f"'maker' waits for nodes: {lacking}") for message in warned)
    assert str(caught.value).startswith(f"'maker' was not up after 2 s; {lacking}")
    assert str(caught.value).endswith("(ray.nodes.maker).")


def run_and_lose(nodes: Nodes, gate: Path, service: str, rules: dict[str, NodeRule], **options: Any) -> dict[str, Any]:
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
    rules = {"taker": NodeRule({"role": "in(a,b)"})}
    with logged() as warned:
        found = run_and_lose(nodes, tmp_path, "taker", rules, maker={"here": True}, taker={"restarts": 1})
    assert found["error"] is None
    assert roles(nodes, tmp_path, "maker") == ["head"]
    assert sorted([found["lost"], found["then"]]) == ["a", "b"]
    (warning,) = [message for message in warned if "died" in message]
    words = r"'taker' died \(node [\d.]+, where it ran, is gone\): restart 1 of 1; rebuilding it, then running again: "
    assert re.fullmatch(words + r"(wait|take)\[1\]\.", warning)


def test_a_service_and_a_value_that_are_gone_with_a_node_end_in_one_sentence_each(nodes: Nodes, tmp_path: Path) -> None:
    nodes.restore()
    rules = {"maker": NodeRule({"role": "b"}), "taker": NodeRule({"role": "a"})}
    found = run_and_lose(nodes, tmp_path, "maker", rules, taker={"restarts": 1})
    assert "a value that it needs is gone with the node that held it" in str(found["error"])
    assert isinstance(found["error"].__cause__, ServiceLost)  # the run resumes from its newest checkpoint
    assert re.fullmatch(r"'maker' died: node [\d.]+, where it ran, is gone", str(found["then"]))


def test_servers_of_a_reward_model_are_where_its_rule_says_behind_a_router_here(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.restore()
    words = ["env", f"PYTHONPATH={Path(__file__).parents[2]}", *COMMAND]
    monkeypatch.setattr(served_models, "serve_command", lambda name, **_options: words)
    (tmp_path / "model").mkdir()
    keys = ["ray.address=auto", "executor=ray", "reward.models.rm.replicas=2", "reward.models.rm.restarts=0"]
    keys += [f"reward.models.rm.path={tmp_path / 'model'}", "ray.nodes.rm.labels.role=b"]
    config, lost = parse_overrides(RunConfig, keys), list[RunError]()

    async def body() -> None:
        executor = RayExecutor(nodes.address, nodes=node_rules(config), directory=str(tmp_path))
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


def test_a_replica_of_an_engine_on_a_node_with_another_model_is_refused(nodes: Nodes) -> None:
    nodes.restore()
    paths = SharedPaths("rollout", {"model.path": "/proc/self/cmdline"})  # each process has a file of its own there
    message = r"^model\.path=.*: node .*, where 'rollout' runs, has another file there; put it on"
    with pytest.raises(ConfigError, match=message):
        start("no_engine:Engine", {}, 2, nodes=NodeRule({"role": "in(a,b)"}, "strict_spread"), paths=paths)
