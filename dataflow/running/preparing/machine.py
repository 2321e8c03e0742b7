"""What this machine has: the memory of its GPUs, and room on its disks. Starts nothing on a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from dataflow.errors import NotChecked
from dataflow.executors.ray.nodes import visible_gpus

GIB = 2**30


class GpuMemory(NamedTuple):
    """The memory of a GPU, in bytes: all of it, and what other processes use."""

    gpu: str
    name: str
    total: int
    used: int


def gpu_memory() -> list[GpuMemory]:
    """Returns the memory of this process's GPUs, as nvidia-smi says it; NotChecked if there are none or it fails."""
    ids = visible_gpus()
    if not ids:
        raise NotChecked("this machine has no GPU to compare it with")
    fields = "--query-gpu=index,uuid,name,memory.total,memory.used"
    command = ["nvidia-smi", fields, "--format=csv,noheader,nounits"]
    try:
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise NotChecked("nvidia-smi does not say how much memory the GPUs have") from error
    found: dict[str, GpuMemory] = {}
    for line in listing.splitlines():
        index, uuid, name, total, used = (word.strip() for word in line.split(","))
        for key in (index, uuid):
            found[key] = GpuMemory(key, name, int(total) << 20, int(used) << 20)
    if missing := [each for each in ids if each not in found]:
        raise NotChecked(f"nvidia-smi does not know GPU {missing[0]}, which CUDA_VISIBLE_DEVICES names")
    return [found[each] for each in ids]


def free_disk(path: Path) -> int:
    """Returns the free bytes of the file system of a path, which need not exist."""
    place = path.absolute()
    while not os.path.isdir(place) and place != place.parent:
        place = place.parent
    return shutil.disk_usage(place).free


def gib(size: float) -> str:
    """Returns a number of bytes in GiB, or in MiB if it is small.

    >>> gib(2**30 * 1.23), gib(2**30 * 123.4), gib(2**20 * 3.2)
    ('1.2 GiB', '123 GiB', '3 MiB')
    """
    number = size / GIB
    if number < 0.1:
        return f"{size / 2**20:.0f} MiB"
    return f"{number:.1f} GiB" if number < 100 else f"{number:,.0f} GiB"
