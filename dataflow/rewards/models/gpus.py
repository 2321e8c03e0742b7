"""Which GPUs of this machine the servers of reward models get, and which are left to the run. Imports no CUDA."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflow.errors import ConfigError, counted

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = Path("/dev")


@dataclass(frozen=True)
class Wanted:
    """What the servers of one model need.

    Attributes:
        servers: number of servers.
        gpus: of each.
        own: whether no one else uses them; else they are those of the run.
    """

    servers: int
    gpus: int
    own: bool


@dataclass(frozen=True)
class GpuPlan:
    """The GPUs of a run.

    Attributes:
        run: ids of those that are left to trainer and engine.
        servers: by model, the ids of each server's as CUDA_VISIBLE_DEVICES has them.
    """

    run: list[str]
    servers: dict[str, list[str]]


def visible_gpus() -> list[str]:
    """Returns the ids of the GPUs of this machine that this process may use."""
    if (given := os.environ.get(VISIBLE)) is not None:
        return [each for each in (word.strip() for word in given.split(",")) if each and each != "-1"]
    names = (re.fullmatch(r"nvidia(\d+)", file.name) for file in _DEVICES.glob("nvidia*"))
    return sorted((name[1] for name in names if name), key=int)


def plan_gpus(wanted: Mapping[str, Wanted], needed: int, gpus: Sequence[str]) -> GpuPlan:
    """Returns which server gets which GPUs; servers with GPUs of their own take the last ones.

    Args:
        wanted: of each model.
        needed: GPUs of trainer and engine.
        gpus: ids of all.

    Raises:
        ConfigError: there are too few.
    """
    taken = sum(each.servers * each.gpus for each in wanted.values() if each.own)
    if needed + taken > len(gpus):
        raise ConfigError(
            f"reward.models: the servers need {counted(taken, 'GPU')} and trainer and engine {needed}, and this "
            f"machine has {len(gpus)}; lower replicas or tensor_parallel, or give placement=colocated or the url of "
            "other servers."
        )
    # Of more GPUs than it needs Ray would choose some, maybe others than those of the colocated servers.
    left = len(gpus) - taken if all(each.own for each in wanted.values()) else needed
    run, own, servers = list(gpus[:left]), list(gpus[len(gpus) - taken :]), {}
    for name, each in wanted.items():
        if not each.own and each.servers * each.gpus > needed:
            raise ConfigError(
                f"reward.models.{name}.placement=colocated: its servers need {counted(each.servers * each.gpus, 'GPU')}"
                f", and trainer and engine have {needed}; lower replicas or tensor_parallel."
            )
        place = own if each.own else run
        begins = range(0, each.servers * each.gpus, each.gpus)
        servers[name] = [",".join(place[begin : begin + each.gpus]) for begin in begins]
        if each.own:
            del own[: each.servers * each.gpus]
    return GpuPlan(run, servers)
