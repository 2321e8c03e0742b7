"""The GPUs of one process, as Ray gives them out: a share of one, whole ones, or the same share of each of several.

The last is none of Ray's own: an actor has a share of one GPU at most. So each share is held by an actor that does
nothing else, on one node, and the process takes none itself but sees all of theirs.
"""

from __future__ import annotations

import os
from typing import Any

from dataflow.errors import ConfigError


class Seat:
    """The actor that holds a share of one GPU."""

    def gpu(self) -> str:
        """Returns the id of the GPU, as CUDA_VISIBLE_DEVICES has it."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


class Gpus:
    """What one process needs of GPUs.

    Args:
        share: of each; a part of one, or whole ones.
        devices: how many.

    Attributes:
        options: of the actor, for Ray.
        seen: handles of the ids of the GPUs that :func:`see` is to be given in the actor; none where Ray does that.

    Raises:
        ConfigError: ``share`` is over 1 and no whole number.
    """

    def __init__(self, share: float, devices: int = 1) -> None:
        self._group: Any = None
        self._seats: list[Any] = []
        if share > 1 and share != int(share):
            raise ConfigError(f"{share:g} GPUs for a process: Ray shares one GPU, not several; give whole ones.")
        if devices == 1 or share == int(share):
            self.options: dict[str, Any] = {"num_cpus": 0, "num_gpus": share * devices}
        else:
            self._take_seats(share, devices)
        self.seen = [seat.gpu.remote() for seat in self._seats]

    def _take_seats(self, share: float, devices: int) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._group = placement_group([{"GPU": share}] * devices, strategy="STRICT_PACK")  # all on one node
        at = [PlacementGroupSchedulingStrategy(self._group, bundle) for bundle in range(devices)]
        seat = ray.remote(Seat)
        self._seats = [seat.options(num_cpus=0, num_gpus=share, scheduling_strategy=each).remote() for each in at]
        self.options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": at[0]}

    def release(self) -> None:
        """Gives the shares back; of those that Ray knows as the actor's own, they end with the actor."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)
        self._group, self._seats = None, []


def see(gpus: tuple[str, ...]) -> None:
    """Lets this process see these GPUs, before it first uses CUDA.

    Raises:
        ConfigError: one of them twice: Ray found room for two shares on it.
    """
    if len(set(gpus)) < len(gpus):
        raise ConfigError(
            f"Ray gave one process {len(gpus)} shares of GPUs {', '.join(gpus)}, which are to be of different ones; "
            "give ray.gpus_per_worker=1, and a trainer rank for each GPU (trainer.world_size)."
        )
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
