"""A Ray cluster of several nodes on this machine, some of which a test loses."""

from __future__ import annotations

from typing import Any

FAST = {"health_check_period_ms": 300, "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3}


class Nodes:
    """The cluster: a head, where the tests run, and two nodes with the labels role=a and role=b."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": FAST},
        )
        self.nodes: dict[str, Any] = {}
        self.restore()

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def restore(self) -> None:
        """Starts the nodes that were lost."""
        for role in [each for each in "ab" if each not in self.nodes]:
            self.nodes[role] = self.cluster.add_node(num_cpus=1, labels={"role": role})

    def lose(self, role: str) -> None:
        self.cluster.remove_node(self.nodes.pop(role), allow_graceful=False)

    def named(self, node: str) -> str:
        """The role of a node; "head" for the other one."""
        return next((role for role, each in self.nodes.items() if each.node_id == node), "head")
