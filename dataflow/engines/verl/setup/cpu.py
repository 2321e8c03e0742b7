"""The CPU platform shim: the device functions that verl's FSDP2 engine calls, for the CPU.

verl supports CUDA, ROCm and NPU; its engine is plain PyTorch and runs on the CPU, given a CPU platform. verl is not
patched: a platform and an engine are registered as plugins. Memory statistics are zeros, since a CPU has no allocator
that counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, get_platform, set_platform

from dataflow.errors import RunError

NAME = "cpu"


class CpuDevice:
    """``torch.cpu`` with further functions that verl calls on ``torch.cuda``."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return 0

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """Returns (free, total) bytes of the machine's memory."""
        import psutil

        memory = psutil.virtual_memory()
        return memory.available, memory.total

    @staticmethod
    def empty_cache() -> None:
        """Does nothing: there is no cache."""

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return NAME

    @staticmethod
    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


class CpuPlatform(PlatformBase):
    """The CPU as a verl platform: one device per process, gloo between processes."""

    device_name = NAME
    vendor_name = NAME
    device_module = CpuDevice()

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        """Returns the device by name: verl passes it to ``.to()``, where an index means an accelerator."""
        return NAME

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """Does nothing: there is one device."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Does nothing: work on the CPU is done when the call returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Does nothing: there is no allocator to set."""

    def empty_cache(self) -> None:
        """Does nothing: there is no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """Does nothing: there is no device profiler."""

    def profiler_stop(self) -> None:
        """Does nothing: there is no device profiler."""

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None


def install() -> None:
    """Makes the CPU verl's platform in this process and registers an FSDP2 engine for it.

    Call it before ``verl.workers.engine`` is imported, which reads the platform at import.

    Raises:
        RunError: the engine was already imported for another device.
    """
    loaded = sys.modules.get("verl.workers.engine.fsdp.transformer_impl")
    if loaded is not None and loaded.device_name != NAME:
        raise RunError(
            f"verl's engine was already imported for '{loaded.device_name}' in this process; "
            "train on the CPU in a process of its own."
        )
    from verl.plugin.platform import platform_manager

    if platform_manager._current_platform is None or get_platform().device_name != NAME:
        PlatformRegistry.register(platform=NAME)(CpuPlatform)
        set_platform(CpuPlatform())

    from verl.workers.engine import EngineRegistry

    if NAME not in EngineRegistry._engines["language_model"]["fsdp2"]:
        EngineRegistry.register(model_type="language_model", backend="fsdp2", device=NAME)(_engine())


def _engine() -> type:
    """Returns verl's engine for the CPU, which computes the log-probs of all response tokens at once."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.torch_functional import calculate_sum_pi_squared_from_logits
    from verl.workers.engine import FSDPEngineWithLMHead

    class CpuEngine(FSDPEngineWithLMHead):
        def prepare_model_outputs(
            self,
            output: Any,
            output_args: dict[str, Any],
            micro_batch: TensorDict,
            logits_processor_func: Any,
        ) -> dict[str, torch.Tensor]:
            """Returns ``log_probs`` (``entropy`` and ``sum_pi_squared`` if asked for), jagged as ``input_ids``.

            They are 0 on prompts. Without its GPU kernel, verl calls logsumexp once per token, including those of
            prompts, whose log-probs are not used. That takes a third of the time of a small model's update.
            """
            ids, logits = micro_batch["input_ids"], output.logits
            offsets = ids.offsets()
            rows, length, vocabulary = logits.shape
            prompt = offsets.diff() - micro_batch["response_tokens"]
            at = torch.arange(length)
            inside = at < offsets.diff()[:, None]
            # The token at t + 1 is drawn from the logits at t.
            drawn = inside & (at >= prompt[:, None] - 1) & (at < offsets.diff()[:, None] - 1)
            flat = drawn.flatten().nonzero().squeeze(1)
            labels = torch.nested.to_padded_tensor(ids, padding=0, output_size=(rows, length)).flatten()[flat + 1]
            log_probs = torch.log_softmax(
                logits.reshape(-1, vocabulary).index_select(0, flat).float() / micro_batch["temperature"], dim=-1
            )

            def jagged(values: torch.Tensor) -> torch.Tensor:
                whole = values.new_zeros(rows * length).index_copy(0, flat, values)
                return torch.nested.nested_tensor_from_jagged(whole[inside.flatten()], offsets)

            outputs = {"log_probs": jagged(log_probs.gather(1, labels[:, None]).squeeze(1))}
            if tu.get_non_tensor_data(micro_batch, "calculate_entropy", default=False):
                outputs["entropy"] = jagged(-(log_probs.exp() * log_probs).sum(dim=-1))
            if tu.get_non_tensor_data(micro_batch, "calculate_sum_pi_squared", default=False):
                outputs["sum_pi_squared"] = jagged(calculate_sum_pi_squared_from_logits(log_probs))
            return outputs

    return CpuEngine
