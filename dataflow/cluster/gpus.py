"""The GPUs of one process under Ray: a share of one, several whole ones, or the same share of each of several.

Ray has no such thing as the last: an actor gets a share of one GPU at most. So for each share an actor that does
nothing else, a slot, holds it, all on one node; the process itself requests no GPU and uses those of its slots.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dataflow.errors import ConfigError, counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")
ANYWHERE: Mapping[str, Any] = MappingProxyType({})
"""Options of an actor that leave its node to Ray."""


class GpuSlot:
    """An actor that holds a share of one GPU."""

    def gpu(self) -> str:
        """Returns the id of the GPU, from CUDA_VISIBLE_DEVICES."""
        return os.environ.get(VISIBLE, "")


class Gpus:
    """The GPUs of one process.

    Args:
        share: of each GPU, at most 1; or a whole number of GPUs.
        devices: number of such shares.
        where: options of the actor that say on which node it runs.

    Attributes:
        options: of the actor, for Ray.
        seen: refs to the ids of the GPUs to pass to :func:`see` in the actor; empty if Ray sets them itself.

    Raises:
        ConfigError: ``share`` is over 1 and not a whole number.
    """

    def __init__(self, share: float, devices: int = 1, where: Mapping[str, Any] = ANYWHERE) -> None:
        self._group: Any = None
        self._slots: list[Any] = []
        if share > 1 and share != int(share):
            raise ConfigError(f"{share:g} GPUs for a process: Ray shares one GPU, not several; give whole ones.")
        if devices == 1 or share == int(share):
            self.options: dict[str, Any] = {"num_cpus": 0, "num_gpus": share * devices, **where}
        else:
            self._take_slots(share, devices, where.get("label_selector"))
        self.seen = [slot.gpu.remote() for slot in self._slots]

    def _take_slots(self, share: float, devices: int, labels: dict[str, str] | None) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        selectors = {"bundle_label_selector": [labels] * devices} if labels else {}
        self._group = placement_group([{"GPU": share}] * devices, strategy="STRICT_PACK", **selectors)  # on one node
        at = [PlacementGroupSchedulingStrategy(self._group, bundle) for bundle in range(devices)]
        slot = ray.remote(GpuSlot)
        self._slots = [slot.options(num_cpus=0, num_gpus=share, scheduling_strategy=each).remote() for each in at]
        self.options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": at[0]}

    def release(self) -> None:
        """Releases the shares of slots; GPUs that the actor requested itself are released with the actor."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        self._group, self._slots = None, []


def visible_gpus() -> list[str]:
    """Returns the ids of the GPUs of this machine that this process may use; imports no CUDA."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return [each for each in (word.strip() for word in given.split(",")) if each and each != "-1"]
    names = (re.fullmatch(r"nvidia(\d+)", file.name) for file in _DEVICES.glob("nvidia*"))
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


def see(gpus: tuple[str, ...]) -> None:
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
