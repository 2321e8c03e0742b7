"""What the nodes of a cluster, or this machine, lack for a service, from labels and resources alone."""

from __future__ import annotations

import pytest

from dataflow.errors import ConfigError
from dataflow.executors.ray.nodes import Node, NodeRule, alive, check_count, lacking

CPU = {"CPU": 0.001}


def node(address: str, cpus: float = 4, gpus: float = 0, **labels: str) -> Node:
    own = {"ray.io/node-id": f"id of {address}", **labels}
    resources = {"CPU": cpus} | ({"GPU": gpus} if gpus else {})
    return {"NodeID": own["ray.io/node-id"], "NodeManagerAddress": address, "Labels": own, "Resources": resources}


CLUSTER = [
    node("10.0.0.1", cpus=0),
    node("10.0.0.2", gpus=8, role="train"),
    node("10.0.0.3", gpus=8, role="train"),
    node("10.0.0.4", role="agents"),
]


GPU = {"GPU": 1}


@pytest.mark.parametrize(
    ("rule", "number", "bundle", "words"),
    [
        (NodeRule(), 1, CPU, ""),
        (NodeRule({"role": "in(agents, train)"}, "strict_spread"), 3, CPU, ""),
        (NodeRule({"role": "!train"}), 1, CPU, ""),
        (NodeRule({"role": "train"}, "spread"), 16, GPU, ""),
        (NodeRule({}, "strict_pack"), 13, {"GPU": 0.6}, ""),
        (
            NodeRule({"role": "rollout"}),
            1,
            CPU,
            "no node of the cluster has the label role=rollout (it has 10.0.0.1: no label; 10.0.0.2: role=train; "
            "10.0.0.3: role=train; 10.0.0.4: role=agents)",
        ),
        (NodeRule({"role": "!in(train,agents)"}), 1, CPU, "no node with the label role=!in(train,agents) has a CPU"),
        (NodeRule({"role": "agents"}), 1, {"GPU": 0.3}, "no node with the label role=agents has 0.3 GPUs"),
        (
            NodeRule({"role": "train"}, "strict_spread"),
            3,
            GPU,
            "strategy=strict_spread needs 3 nodes with the label role=train, and the cluster has 2",
        ),
        (
            NodeRule({}, "strict_pack"),
            9,
            GPU,
            "strategy=strict_pack needs 9 GPUs on one node, and no node has them",
        ),
        (
            NodeRule({"role": "train"}),
            27,
            {"GPU": 0.6},
            "it needs 16.2 GPUs, and the nodes with the label role=train can give it 15.6",
        ),
    ],
)
def test_what_a_cluster_lacks_for_a_service_is_said(
    rule: NodeRule, number: int, bundle: dict[str, float], words: str
) -> None:
    assert lacking(rule, number, bundle, CLUSTER) == words


def test_nodes_that_are_gone_are_left_out() -> None:
    rows = [{"NodeID": "a", "Alive": True, "Labels": {}}, {"NodeID": "b", "Alive": False, "Labels": None}]
    assert [each["NodeID"] for each in alive(rows)] == ["a"]
    assert lacking(NodeRule(), 1, CPU, []) == "the cluster has no node that is alive"


def test_a_machine_with_too_few_gpus_is_an_error_at_once() -> None:
    assert check_count(1.6, 2) == "2 of 2"
    with pytest.raises(ConfigError, match=r"ray\.gpus_per_worker: the run needs 1 GPU, and finds none"):
        check_count(1.0, 0)
