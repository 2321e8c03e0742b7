"""Servers of reward models on the nodes of a cluster: where they run, and what follows when one is lost.

The servers are stand-ins; ``benchmarks/machines.py`` places real ones on separate machines.
"""

from __future__ import annotations

import os
import queue
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dataflow.cluster.joined import JoinedRay, own_address
from dataflow.config.keys.overrides import parse_overrides
from dataflow.errors import ConfigError, RunError
from dataflow.rewards.models.keeper import ModelServers
from dataflow.rewards.models.site import ServerPlan
from dataflow.running.services.placed_models import PlacedModel
from pipelines import gsm8k_grpo
from tests.rigs.cluster import Nodes
from tests.rigs.logs import logged
from tests.rigs.model_server import fake_command
from tests.rigs.processes import until

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

READY_S = 60.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    made = Nodes()
    try:
        with JoinedRay(made.address):
            yield made
    finally:
        made.cluster.shutdown()


class Served:
    """The servers of one model on the cluster; a context manager."""

    def __init__(self, directory: Path, *overrides: str) -> None:
        model = directory / "model"
        model.mkdir(exist_ok=True)
        keys = ["ray.address=auto", f"reward.models.rm.path={model}", "ray.start_timeout=20"]
        config: Any = parse_overrides(gsm8k_grpo.Config, [*keys, *overrides])
        words = fake_command(0)[:-1]  # by value: a node cannot import the rigs
        environment = f"{Path(__file__).parents[4]}"
        plan = ServerPlan(
            lambda port, host: ["env", f"PYTHONPATH={environment}", *words, str(port), "--host", host], "cpu"
        )
        given = config.reward.models["rm"]
        self.lost: queue.Queue[RunError] = queue.Queue()
        self.placed = PlacedModel("rm", given, config, plan, directory, own_address())
        self._directory, self._restarts = directory, given.restarts

    def __enter__(self) -> Served:
        self.placed.__enter__()
        self.servers = ModelServers(
            "rm",
            self.placed.sites,
            logs=self._directory / "servers",
            start_s=READY_S,
            restarts=self._restarts,
            on_lost=self.lost.put,
        )
        self.servers.__enter__()
        self.servers.ready.result(READY_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.servers.__exit__()
        self.placed.__exit__()

    def answers(self, number: int = 0) -> bool:
        try:
            with urllib.request.urlopen(f"{self.servers.urls[number]}/health", timeout=READY_S) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False

    def process(self, number: int = 0) -> Any:
        return self.servers._servers[number].process

    def roles(self, nodes: Nodes) -> list[str]:
        return [nodes.named(self.process(number)._where.node) for number in range(len(self.servers.urls))]


def test_a_server_runs_where_its_rule_says_and_moves_when_its_node_is_lost(nodes: Nodes, tmp_path: Path) -> None:
    with Served(tmp_path, "ray.nodes.rm.labels.role=in(a,b)", "reward.models.rm.restarts=2") as served:
        (url,), (before,) = served.servers.urls, served.roles(nodes)
        assert url.startswith(f"http://{own_address()}:")
        assert before in ("a", "b")
        assert served.answers()
        assert (tmp_path / "servers" / "rm-0.log").read_text()
        with logged() as warned:
            os.killpg(served.process().pid, signal.SIGKILL)
            assert until(lambda: served.servers.restarted == 1 and served.answers(), READY_S)
            assert served.roles(nodes)[0] in ("a", "b")
            (now,) = served.roles(nodes)
            nodes.lose(now)
            assert until(lambda: served.servers.restarted == 2 and served.answers(), READY_S)
        assert served.roles(nodes) == [{"a": "b", "b": "a"}[now]]
        assert served.servers.urls == [url]
    nodes.restore()
    killed, moved = (message for message in warned if "restart" in message)
    assert killed.startswith("reward model 'rm': server 0 ended (killed, or out of memory): restart 1 of 2; requests")
    assert moved.startswith("reward model 'rm': server 0 ended (node ")
    assert "where it ran, is gone): restart 2 of 2; requests in flight there are sent again." in moved
    assert served.lost.empty()


def test_without_another_node_the_others_go_on_and_the_last_loss_is_a_sentence(nodes: Nodes, tmp_path: Path) -> None:
    rules = ["ray.nodes.rm={labels: {role: 'in(a,b)'}, strategy: strict_spread}", "reward.models.rm.replicas=2"]
    with Served(tmp_path, *rules, "ray.start_timeout=2") as served:
        assert sorted(served.roles(nodes)) == ["a", "b"]
        with logged() as warned:
            nodes.lose(served.roles(nodes)[1])
            assert until(lambda: any("the run goes on with" in message for message in warned), READY_S)
            assert served.answers(0)
            assert not served.answers(1)
            nodes.lose(served.roles(nodes)[0])
            error = served.lost.get(timeout=READY_S)
    nodes.restore()
    clause = "strategy=strict_spread needs 2 nodes with the label role=in(a,b), and the cluster has 1 (ray.nodes.rm)"
    assert f"reward model 'rm': server 1 was not placed after 2 s; {clause}; the run goes on with 1 of" in warned[-2]
    assert str(error).startswith("reward model 'rm': server 0 was not placed after 2 s; no node of the cluster has the")
    assert str(error).endswith("(ray.nodes.rm).")


def test_a_rule_that_no_node_keeps_is_a_sentence_before_anything_is_started(nodes: Nodes, tmp_path: Path) -> None:
    served = Served(tmp_path, "ray.nodes.rm.labels.role=c", "ray.start_timeout=1")
    with logged() as warned, pytest.raises(RunError) as caught:
        served.__enter__()
    words = "no node of the cluster has the label role=c (it has"
    assert warned[0].startswith(f"reward model 'rm' waits for nodes: {words}")
    assert str(caught.value).startswith(f"reward model 'rm': server 0 was not placed after 1 s; {words}")
    assert not (tmp_path / "servers").exists()


def test_a_node_without_the_run_directory_is_refused(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(tmp_path, "ray.nodes.rm.labels.role=a")
    from dataflow.executors.ray import shared_paths

    monkeypatch.setattr(shared_paths, "marked", _elsewhere(shared_paths.marked))
    with pytest.raises(ConfigError, match=r"^runs: node .*, where 'rm' runs, does not see the run's directory"):
        served.__enter__()


def _elsewhere(marked: Any) -> Any:
    """Returns a context manager whose marker no process sees, as in a directory that is not shared."""
    import contextlib

    @contextlib.contextmanager
    def inner(directory: str) -> Iterator[str]:
        with marked(directory) as marker:
            yield f"{marker}-elsewhere"

    return inner
