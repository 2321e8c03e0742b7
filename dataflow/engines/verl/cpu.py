"""The CPU as a platform of verl's: the device functions that its FSDP2 engine, which is plain PyTorch, calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, set_platform

NAME = "cpu"


def _nothing(*_arguments: Any, **_options: Any) -> int:
    """Stands for what there is not on a CPU: a cache, an allocator that counts, a profiler, work in flight."""
    return 0


class CpuDevice:
    """``torch.cpu`` with the functions that verl calls on ``torch.cuda``."""

    memory_allocated = memory_reserved = max_memory_allocated = max_memory_reserved = staticmethod(_nothing)
    empty_cache = staticmethod(_nothing)
    mem_get_info = staticmethod(lambda *_device: (0, 0))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


class CpuPlatform(PlatformBase):
    """One device per process, gloo between processes."""

    device_name = vendor_name = NAME
    device_module = CpuDevice()
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        """Returns the device by name: verl passes it to ``.to()``, where an index means an accelerator."""
        return NAME

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


@functools.cache
def install() -> None:
    """Makes the CPU verl's platform in this process; call it before verl's engines are imported, which read it."""
    set_platform(CpuPlatform())
