"""Asking a cluster before a run: what it has, what a service lacks, and a cluster that does not answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.running.preparing import cluster
from dataflow.running.services.hosting import REPLICAS
from dataflow.stage import Hosted

Asked = Callable[..., str]
UNLABELLED: dict[str, object] = {"Labels": {}}
NODES = [
    {
        "NodeID": "a",
        "NodeManagerAddress": "10.0.0.1",
        "Alive": True,
        "Labels": {},
        "Resources": {"CPU": 8.0, "GPU": 2.0},
    },
    {
        "NodeID": "b",
        "NodeManagerAddress": "10.0.0.2",
        "Alive": True,
        "Labels": {},
        "Resources": {"CPU": 8.0, "GPU": 2.0},
    },
    {"NodeID": "c", "NodeManagerAddress": "10.0.0.3", "Alive": False, "Resources": {"GPU": 8.0}},
]
ANSWER = json.dumps({"nodes": NODES, "free": {"CPU": 15.0, "GPU": 1.0}})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Checks a cluster whose process runs some code, for a run with some services."""

    def check(code: str, *hosts: Hosted, nodes: dict[str, Any] | None = None) -> str:
        monkeypatch.setattr(cluster, "command", lambda module, address: [sys.executable, "-S", "-c", code])
        config = SimpleNamespace(ray=SimpleNamespace(address="10.0.0.1:6379", nodes=nodes or {}))
        return cluster.check_cluster(config, {host.name: host for host in hosts}, 0.5 if "sleep" in code else 20.0)

    return check


def printing(text: str) -> str:
    return f"print('a line of Ray'); print({text!r})"


def test_what_a_cluster_has_and_what_is_free(asked: Asked) -> None:
    trainer = Hosted("trainer", "a:b", {}, ranks=4, gpus=0.5)
    assert asked(printing(ANSWER), trainer) == "2 nodes with 16 CPUs (15 free) and 4 GPUs (1 free)"
    alone = json.dumps({"nodes": [{**NODES[0], "Resources": {"CPU": 2.0}}], "free": {"CPU": 2.0}})
    assert asked(printing(alone)) == "1 node with 2 CPUs (2 free) and no GPU"
    one = json.dumps({"nodes": [{**NODES[0], "Resources": {"CPU": 1.0, "GPU": 1.0}}], "free": {}})
    assert asked(printing(one)) == "1 node with 1 CPU (0 free) and 1 GPU (0 free)"


@pytest.mark.parametrize(
    ("hosts", "nodes", "message"),
    [
        ([Hosted("trainer", "a:b", {}, ranks=5, gpus=1.0)], {}, "'trainer' does not fit on the cluster: it needs 5"),
        ([Hosted("rollout", REPLICAS, {"number": 2, "gpus": 1.0, "devices": 3})], {}, "no node has 3 GPUs"),
        (
            [Hosted("a", "a:b", {}, ranks=3, gpus=1.0), Hosted("b", "a:b", {}, ranks=2, gpus=1.0)],
            {},
            "the run needs 5 GPUs, and the cluster has 4; give fewer ranks",
        ),
        (
            [Hosted("trainer", "a:b", {})],
            {"trainer": SimpleNamespace(labels={"kind": "h100"}, strategy="pack")},
            "no node of the cluster has the label kind=h100",
        ),
    ],
)
def test_what_does_not_fit_is_said(asked: Asked, hosts: list[Hosted], nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked(printing(ANSWER), *hosts, nodes=nodes)
    assert str(error.value).startswith("ray.address=10.0.0.1:6379: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (printing('{"error": "ray.address=x: no Ray cluster answers there."}'), "no Ray cluster answers there"),
        ("import time; time.sleep(60)", "does not answer within 0.5 s; look at it with 'ray status'"),
        ("import sys; sys.exit('killed')", "the cluster could not be asked (killed)"),
        ("", "the cluster could not be asked (exit code 0)"),
    ],
)
def test_a_cluster_that_gives_no_answer_is_a_problem(asked: Asked, code: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        asked(code)
    assert message in str(error.value)
