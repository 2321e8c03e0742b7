"""The nodes and GPUs of a service's processes: which it may use, what a cluster lacks for it, and its reservation.

Nodes are rows of ``ray.nodes()``.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from loguru import logger

from dataflow.errors import ConfigError, counted

Strategy: TypeAlias = Literal["pack", "spread", "strict_pack", "strict_spread"]
Node: TypeAlias = Mapping[str, Any]
NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
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


def alive(rows: Sequence[Node]) -> list[Node]:
    """Returns the nodes that are alive, of those that ``ray.nodes()`` returns."""
    return [row for row in rows if row["Alive"]]


def lacking(rule: NodeRule, number: int, bundle: Mapping[str, float], nodes: Sequence[Node]) -> str:
    """Returns what the nodes of a cluster lack for the processes of a service, as a clause; "" if nothing is known.

    Resources that other processes use are not considered.

    Args:
        rule: of the service.
        number: of its processes.
        bundle: resources of each.
        nodes: that are alive.
    """
    labelled = [node for node in nodes if all(_selected(s, node["Labels"].get(n)) for n, s in rule.labels.items())]
    wanted = ", ".join(f"{name}={value}" for name, value in rule.labels.items())
    of = f" with the label {wanted}" if wanted else ""
    if not nodes:
        return "the cluster has no node that is alive"
    if not labelled:
        return f"no node of the cluster has the label {wanted} (it has {'; '.join(map(_named, nodes[:8]))})"
    kind, each = next(iter(bundle.items()))
    rooms = [room for node in labelled if (room := int(node["Resources"].get(kind, 0) / each + 1e-9))]
    if not rooms:
        return f"no node{of} has {'a CPU' if kind == 'CPU' else counted(each, kind)}"
    if rule.strategy == "strict_spread" and len(rooms) < number:
        return f"strategy=strict_spread needs {number} nodes{of}, and the cluster has {len(rooms)}"
    if rule.strategy == "strict_pack" and max(rooms) < number:
        return f"strategy=strict_pack needs {counted(number * each, kind)} on one node{of}, and no node has them"
    if sum(rooms) < number:
        return f"it needs {counted(number * each, kind)}, and the nodes{of} can give it {sum(rooms) * each:g}"
    return ""


def _selected(selector: str, value: str | None) -> bool:
    """Returns whether a value of a label (None: it has none) is what a selector of Ray's names."""
    text = selector.removeprefix("!")
    names = text[3:-1].split(",") if text.startswith("in(") and text.endswith(")") else [text]
    return (value in [name.strip() for name in names]) != selector.startswith("!")


def _named(node: Node) -> str:
    """Returns a node's address and the labels that its user gave it."""
    own = ", ".join(f"{k}={v}" for k, v in sorted(node["Labels"].items()) if not k.startswith("ray.io/"))
    return f"{node['NodeManagerAddress']}: {own or 'no label'}"


def log_nodes(what: str, ids: Sequence[str]) -> None:
    """Logs where the processes of a service are, if the cluster has several nodes.

    Args:
        what: the service.
        ids: of the node of each process.
    """
    import ray

    nodes = {node["NodeID"]: _named(node) for node in alive(ray.nodes())}
    if len(nodes) > 1:
        found = [f"{nodes.get(id, 'a lost node')} x {number}" for id, number in Counter(ids).items()]
        logger.info(f"{what} runs on {'; '.join(found)}")


class Places:
    """The places of a service's processes: which node each runs on, and its GPUs.

    A process has a share of one GPU, several whole ones, or the same share of each of several. Ray has no such thing as
    the last: an actor gets a share of one GPU at most. So for each share an actor that does nothing else, a slot,
    holds it, all on one node; the process itself requests no GPU and uses those of its slots.

    Args:
        number: of processes.
        share: of each GPU of a process, at most 1; or a whole number of GPUs.
        devices: number of such shares of each process.
        rule: for the nodes; None leaves them to Ray, as on a cluster of one.

    Attributes:
        bundle: resources of a process.
        options: of the actor of each process, for Ray.
        seen: of each process, refs to the ids of the GPUs to pass to :func:`see` in it; none if Ray sets them itself.

    Raises:
        ConfigError: ``share`` is over 1 and not a whole number.
    """

    def __init__(self, number: int, share: float, devices: int = 1, rule: NodeRule | None = None) -> None:
        if share > 1 and share != int(share):
            raise ConfigError(f"{share:g} GPUs for a process: Ray shares one GPU, not several; give whole ones.")
        self.bundle: dict[str, float] = {"GPU": share * devices} if share else {"CPU": _CPU}
        self._groups: list[Any] = []
        self._slots: list[Any] = []
        self.seen: list[list[Any]] = [[] for _ in range(number)]
        labels = dict(rule.labels) if rule else {}
        if devices > 1 and share != int(share):
            self.options = [self._take_slots(at, share, devices, labels) for at in range(number)]
            return
        where: list[dict[str, Any]] = [{"label_selector": labels} if labels else {}] * number
        if rule is not None and number > 1:
            where = [{"scheduling_strategy": at} for at in self._group([self.bundle] * number, rule.strategy, labels)]
        self.options = [{"num_cpus": 0, "num_gpus": share * devices, **each} for each in where]

    def _group(self, bundles: list[dict[str, float]], strategy: Strategy, labels: dict[str, str]) -> list[Any]:
        """Reserves resources together; returns what names each of them to Ray."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        selectors = {"bundle_label_selector": [labels] * len(bundles)} if labels else {}
        group = placement_group(bundles, strategy=strategy.upper(), **selectors)
        self._groups.append(group)
        return [PlacementGroupSchedulingStrategy(group, at) for at in range(len(bundles))]

    def _take_slots(self, process: int, share: float, devices: int, labels: dict[str, str]) -> dict[str, Any]:
        import ray

        at = self._group([{"GPU": share}] * devices, "strict_pack", labels)
        slot = ray.remote(_Slot)
        slots = [slot.options(num_cpus=0, num_gpus=share, scheduling_strategy=each).remote() for each in at]
        self._slots += slots
        self.seen[process] = [each.gpu.remote() for each in slots]
        return {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": at[0]}

    def release(self) -> None:
        """Releases what was reserved; GPUs that an actor requested itself are released with the actor."""
        from ray.util.placement_group import remove_placement_group

        for group in self._groups:
            remove_placement_group(group)
        self._groups, self._slots = [], []


class _Slot:
    """An actor that holds a share of one GPU."""

    def gpu(self) -> str:
        """Returns the id of the GPU, from CUDA_VISIBLE_DEVICES."""
        return os.environ.get(VISIBLE, "")


def see(gpus: Sequence[str]) -> None:
    """Makes these GPUs visible to this process; call it before the first use of CUDA.

    Args:
        gpus: ids for CUDA_VISIBLE_DEVICES; empty to leave it as it is.

    Raises:
        ConfigError: an id stands twice, as Ray placed two shares on one GPU.
    """
    if len(set(gpus)) < len(gpus):
        raise ConfigError(
            f"Ray gave one process {len(gpus)} shares of GPUs {', '.join(gpus)}, but each must be of another GPU; "
            "give ray.gpus_per_worker=1, and a trainer rank for each GPU (trainer.world_size)."
        )
    if gpus:
        os.environ[VISIBLE] = ",".join(gpus)


def visible_gpus() -> list[str]:
    """Returns the ids of the GPUs of this machine that this process may use; imports no CUDA."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return [each for each in (word.strip() for word in given.split(",")) if each and each != "-1"]
    names = (re.fullmatch(r"nvidia(\d+)", file.name) for file in Path("/dev").glob("nvidia*"))
    return sorted((name[1] for name in names if name), key=int)


def check_count(wanted: float, there: float) -> str:
    """Checks that a machine has the GPUs that a run needs, for which Ray would wait; returns how many it has.

    Raises:
        ConfigError: it has too few.
    """
    if wanted <= there:
        return f"{math.ceil(wanted)} of {there:g}"
    found = f"only {there:g}" if there else "none"
    raise ConfigError(
        f"ray.gpus_per_worker: the run needs {counted(math.ceil(wanted), 'GPU')}, and finds {found} on this machine; "
        "leave it out to run on the CPU, give fewer ranks (trainer.world_size), or check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES."
    )
