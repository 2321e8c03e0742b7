"""The nodes of a Ray cluster: which of them the processes of a service may use, and how its ranks are placed on them.

Pure but for :func:`beside`, :func:`log_nodes` and :class:`Places`, which reserves nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from loguru import logger

from dataflow.cluster.gpus import Gpus
from dataflow.errors import counted

Strategy: TypeAlias = Literal["pack", "spread", "strict_pack", "strict_spread"]
NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""
_CPU = 0.001
"""CPUs that are reserved on the node of a rank without a GPU: Ray reserves no node without any resource."""


@dataclass(frozen=True)
class NodeRule:
    """On which nodes the processes of a service run.

    Attributes:
        labels: that a node must have; a value may be one of Ray's selectors, such as ``in(a,b)``.
        strategy: of several processes: on few nodes (pack) or on many (spread); with ``strict_`` on one, or one each.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    strategy: Strategy = "pack"


@dataclass(frozen=True)
class Node:
    """A node of the cluster.

    Attributes:
        id: that Ray gave it.
        address: of it.
        labels: of it.
        resources: all that it has, used or not.
    """

    id: str
    address: str
    labels: Mapping[str, str]
    resources: Mapping[str, float]


def nodes_of(rows: Sequence[Mapping[str, Any]]) -> list[Node]:
    """Returns the nodes that are alive, from what ``ray.nodes()`` returns."""
    return [
        Node(row["NodeID"], row["NodeManagerAddress"], row.get("Labels") or {}, row.get("Resources") or {})
        for row in rows
        if row["Alive"]
    ]


def bundle_of(share: float, devices: int = 1) -> dict[str, float]:
    """Returns the resources of a process with a share of a number of GPUs."""
    return {"GPU": share * devices} if share else {"CPU": _CPU}


def lacking(rule: NodeRule, number: int, bundle: Mapping[str, float], nodes: Sequence[Node]) -> str:
    """Returns what the nodes of a cluster lack for the processes of a service, as a clause; "" if nothing is known.

    Resources that other processes use are not considered.

    Args:
        rule: of the service.
        number: of its processes.
        bundle: resources of each.
        nodes: that are alive.
    """
    if not nodes:
        return "the cluster has no node that is alive"
    wanted = ", ".join(f"{name}={value}" for name, value in rule.labels.items())
    labelled = [node for node in nodes if _matches(rule.labels, node.labels)]
    if not labelled:
        return f"no node of the cluster has the label {wanted} (it has {_listed(nodes)})"
    roomy = [node for node in labelled if _times(bundle, node)]
    of = f" with the label {wanted}" if wanted else ""
    kind, each = next(((name, value) for name, value in bundle.items() if value > _CPU), ("", 0.0))
    if not roomy:
        return f"no node{of} has {counted(each, kind)}" if kind else f"no node{of} has a CPU for Ray's actors"
    if rule.strategy == "strict_spread" and len(roomy) < number:
        return f"strategy=strict_spread needs {number} nodes{of}, and the cluster has {len(roomy)}"
    if rule.strategy == "strict_pack" and max(_times(bundle, node) for node in roomy) < number:
        return f"strategy=strict_pack needs {counted(number * each, kind)} on one node{of}, and no node has them"
    if (room := sum(_times(bundle, node) for node in roomy)) < number:
        where = f"the nodes{of}" if of else "the cluster"
        return f"it needs {counted(number * each, kind)}, and {where} can give it {room * each:g}"
    return ""


def _matches(selectors: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(_selected(selector, labels.get(name)) for name, selector in selectors.items())


def _selected(selector: str, value: str | None) -> bool:
    """Returns whether a value of a label (None: it has none) is what a selector of Ray's names."""
    negated = selector.startswith("!")
    text = selector.removeprefix("!")
    names = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
    return (value in [name.strip() for name in names]) != negated


def _times(bundle: Mapping[str, float], node: Node) -> int:
    """Returns how many bundles a node has room for."""
    return min(int(node.resources.get(name, 0) / value + 1e-9) for name, value in bundle.items())


def _listed(nodes: Sequence[Node]) -> str:
    """Returns nodes with the labels that their users gave them."""
    listed = [f"{node.address}: {_own_labels(node) or 'none'}" for node in nodes[:8]]
    return "; ".join(listed) + ("; ..." if len(nodes) > len(listed) else "")


def _own_labels(node: Node) -> str:
    own = [f"{name}={value}" for name, value in sorted(node.labels.items()) if not name.startswith("ray.io/")]
    return ", ".join(own)


def log_nodes(what: str, ids: Sequence[str]) -> None:
    """Logs where the processes of a service are, if the cluster has several nodes.

    Args:
        what: the service.
        ids: of the node of each process.
    """
    import ray

    nodes = {node.id: node for node in nodes_of(ray.nodes())}
    if len(nodes) < 2:
        return
    found = []
    for id, number in Counter(ids).items():
        node = nodes.get(id)  # it may be lost by now
        where = "a lost node" if node is None else node.address
        labels = _own_labels(node) if node is not None else ""
        found.append(where + (f" ({labels})" if labels else "") + (f" x {number}" if number > 1 else ""))
    logger.info(f"{what} runs on {', '.join(found)}")


class Places:
    """The places of a service's processes: which node each runs on, and its GPUs.

    Args:
        number: of processes.
        share: of each GPU of a process; see :class:`~dataflow.cluster.gpus.Gpus`.
        devices: number of such shares of each process.
        rule: for the nodes; None leaves them to Ray, as on a cluster of one.

    Attributes:
        gpus: of each process, with the options of its actor.
    """

    def __init__(self, number: int, share: float, devices: int = 1, rule: NodeRule | None = None) -> None:
        self.bundle = bundle_of(share, devices)
        self._group: Any = None
        labels = dict(rule.labels) if rule else {}
        bundles: list[dict[str, Any]] = [{"label_selector": labels} if labels else {}] * number
        # Shares of several GPUs are placed one process at a time: each takes a group of its own, on one node.
        if rule is not None and number > 1 and (devices == 1 or share == int(share)):
            bundles = self._reserve(number, rule.strategy, labels)
        self.gpus = [Gpus(share, devices, each) for each in bundles]

    def _reserve(self, number: int, strategy: Strategy, labels: dict[str, str]) -> list[dict[str, Any]]:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        selectors = {"bundle_label_selector": [labels] * number} if labels else {}
        self._group = placement_group([self.bundle] * number, strategy=strategy.upper(), **selectors)
        return [{"scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, at)} for at in range(number)]

    def release(self) -> None:
        """Releases the nodes and the shares of GPUs."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for gpus in self.gpus:
            gpus.release()
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        self._group, self.gpus = None, []
