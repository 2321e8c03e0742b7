"""What the nodes of a cluster lack for a service, from their labels and resources alone."""

from __future__ import annotations

import pytest

from dataflow.executors.ray.nodes import Node, NodeRule, alive, lacking

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


@pytest.mark.parametrize(
    ("rule", "number", "bundle"),
    [
        (NodeRule(), 1, CPU),
        (NodeRule({"role": "agents"}), 1, CPU),
        (NodeRule({"role": "in(agents, train)"}, "strict_spread"), 3, CPU),
        (NodeRule({"role": "!train"}), 1, CPU),
        (NodeRule({"role": "!in(train,agents)", "ray.io/node-id": "id of 10.0.0.1"}), 0, CPU),
        (NodeRule(), 16, {"GPU": 1}),
        (NodeRule({"role": "train"}, "spread"), 16, {"GPU": 1}),
        (NodeRule({}, "strict_pack"), 8, {"GPU": 1}),
        (NodeRule({}, "strict_pack"), 13, {"GPU": 0.6}),
    ],
)
def test_a_rule_that_the_cluster_can_keep_lacks_nothing(rule: NodeRule, number: int, bundle: dict[str, float]) -> None:
    labels = "role=!in(train,agents), ray.io/node-id=id of 10.0.0.1"
    assert lacking(rule, number, bundle, CLUSTER) == ("" if number else f"no node with the label {labels} has a CPU")


@pytest.mark.parametrize(
    ("rule", "number", "bundle", "words"),
    [
        (
            NodeRule({"role": "rollout"}),
            1,
            CPU,
            "no node of the cluster has the label role=rollout (it has 10.0.0.1: no label; 10.0.0.2: role=train; "
            "10.0.0.3: role=train; 10.0.0.4: role=agents)",
        ),
        (NodeRule({"role": "agents"}), 1, {"GPU": 0.3}, "no node with the label role=agents has 0.3 GPUs"),
        (
            NodeRule({"role": "train"}, "strict_spread"),
            3,
            {"GPU": 1},
            "strategy=strict_spread needs 3 nodes with the label role=train, and the cluster has 2",
        ),
        (
            NodeRule({}, "strict_pack"),
            9,
            {"GPU": 1},
            "strategy=strict_pack needs 9 GPUs on one node, and no node has them",
        ),
        (
            NodeRule({"role": "train"}),
            27,
            {"GPU": 0.6},
            "it needs 16.2 GPUs, and the nodes with the label role=train can give it 15.6",
        ),
        (NodeRule(), 17, {"GPU": 1}, "it needs 17 GPUs, and the nodes can give it 16"),
        (NodeRule({"role": "agents"}), 1, {"GPU": 1.0}, "no node with the label role=agents has 1 GPU"),
    ],
)
def test_what_a_cluster_lacks_is_said(rule: NodeRule, number: int, bundle: dict[str, float], words: str) -> None:
    assert lacking(rule, number, bundle, CLUSTER) == words


def test_a_cluster_without_a_node_is_said() -> None:
    assert lacking(NodeRule(), 1, CPU, []) == "the cluster has no node that is alive"


def test_nodes_that_are_gone_are_left_out() -> None:
    rows = [
        {"NodeID": "a", "NodeManagerAddress": "10.0.0.1", "Alive": True, "Resources": {"CPU": 1.0}, "Labels": {}},
        {"NodeID": "b", "NodeManagerAddress": "10.0.0.2", "Alive": False, "Resources": {}, "Labels": None},
    ]
    assert [each["NodeID"] for each in alive(rows)] == ["a"]
