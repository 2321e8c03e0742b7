"""The nodes and GPUs of a service's processes: which it may use, what a cluster lacks for it, and its reservation."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dataflow.errors import ConfigError, counted

Labels: TypeAlias = Mapping[str, str]
NODE_ID = "ray.io/node-id"
"""The label that Ray gives each node."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_CPU = 0.001
"""CPUs that are reserved on the node of a rank without a GPU: Ray reserves no node without any resource."""


@dataclass(frozen=True)
class Cluster:
    """A cluster that the run has joined.

    Attributes:
        here: id of the node of the process that starts services.
        labels: that the nodes of a service must have, by service; a value may be a selector of Ray's, as ``in(a,b)``.
    """

    here: str
    labels: Mapping[str, Labels] = field(default_factory=dict)
    directory: str | None = None


def lacking(labels: Labels, number: int, bundle: Mapping[str, float], nodes: Sequence[Mapping[str, Any]]) -> str:
    """Returns what nodes (rows of ``ray.nodes()``) lack for a number of processes with these resources, as a clause.

    "" if nothing is known: what other processes use of them is not considered.
    """

    def selected(selector: str, value: str | None) -> bool:
        text = selector.removeprefix("!")
        names = text[3:-1].split(",") if text.startswith("in(") else [text]
        return (value in [name.strip() for name in names]) != selector.startswith("!")

    alive = [node for node in nodes if node["Alive"]]
    fit = [node for node in alive if all(selected(s, node["Labels"].get(n)) for n, s in labels.items())]
    wanted = ", ".join(f"{name}={value}" for name, value in labels.items())
    if not fit:
        return f"no node of the cluster has the label {wanted}"
    kind, each = next(iter(bundle.items()))
    there = sum(node["Resources"].get(kind, 0) for node in fit)
    if there >= number * each:
        return ""
    of = f" with the label {wanted}" if wanted else ""
    return f"it needs {counted(number * each, kind)}, and the nodes{of} have {there:g}"


class Places:
    """The places of a service's processes: which node each runs on, and its GPUs.

    A process has a share of one GPU, several whole ones, or the same share of each of several. Ray has no such thing as
    the last: an actor gets a share of one GPU at most. So for each share an actor that does nothing else, a slot, holds
    it, all on one node; the process itself requests no GPU and uses those of its slots.

    Processes with GPUs are put on few nodes, others on many.

    Args:
        share: of each GPU of a process, at most 1; or a whole number of GPUs.
        devices: number of such shares of each process.
        labels: that a node must have; None leaves the nodes to Ray, as on a cluster of one.

    Attributes:
        seen: of each process, refs to the ids of the GPUs to pass to :func:`see` in it; none if Ray sets them itself.
    """

    def __init__(self, number: int, share: float, devices: int = 1, labels: Labels | None = None) -> None:
        if share > 1 and share != int(share):
            raise ConfigError(f"{share:g} GPUs for a process: Ray shares one GPU, not several; give whole ones.")
        self.bundle: dict[str, float] = {"GPU": share * devices} if share else {"CPU": _CPU}
        self.seen: list[list[Any]] = [[] for _ in range(number)]
        self._groups: list[Any] = []
        self._slots: list[Any] = []
        own = dict(labels or {})
        if devices > 1 and share != int(share):
            self.options = [self._take_slots(at, share, devices, own) for at in range(number)]
            return
        where: list[dict[str, Any]] = [{"label_selector": own} if own else {}] * number
        if labels is not None and number > 1:
            where = self._group([self.bundle] * number, "PACK" if share else "SPREAD", own)
        self.options = [{"num_cpus": 0, "num_gpus": share * devices, **each} for each in where]

    def _group(self, bundles: list[dict[str, float]], strategy: str, labels: dict[str, str]) -> list[dict[str, Any]]:
        """Reserves resources together; returns the option that names each of them to Ray."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        selectors = {"bundle_label_selector": [labels] * len(bundles)} if labels else {}
        group = placement_group(bundles, strategy=strategy, **selectors)
        self._groups.append(group)
        return [{"scheduling_strategy": PlacementGroupSchedulingStrategy(group, at)} for at in range(len(bundles))]

    def _take_slots(self, process: int, share: float, devices: int, labels: dict[str, str]) -> dict[str, Any]:
        import ray

        where = self._group([{"GPU": share}] * devices, "STRICT_PACK", labels)
        slot = ray.remote(_Slot)
        slots = [slot.options(num_cpus=0, num_gpus=share, **each).remote() for each in where]
        self._slots += slots
        self.seen[process] = [each.gpu.remote() for each in slots]
        return {"num_cpus": 0, "num_gpus": 0, **where[0]}

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
    """Makes these GPUs visible to this process, before the first use of CUDA; none leaves all as it is."""
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
    """Checks that a machine has the GPUs that a run needs, for which Ray would wait; returns how many it has."""
    if wanted <= there:
        return f"{math.ceil(wanted)} of {there:g}"
    found = f"only {there:g}" if there else "none"
    raise ConfigError(
        f"ray.gpus_per_worker: the run needs {counted(math.ceil(wanted), 'GPU')}, and finds {found} on this machine; "
        "leave it out to run on the CPU, give fewer ranks (trainer.world_size), or check nvidia-smi and "
        "CUDA_VISIBLE_DEVICES."
    )
