"""The sending side of a weight sync with an ``AsyncLLM``, by vLLM's own calls.

On GPUs that is its weight transfer by CUDA IPC: weights are packed into a buffer on each GPU, which the worker there
maps, so that a GPU needs no more memory than the buffer. On a CPU, where vLLM has no transfer, its workers reload the
weights from a file in shared memory.

Importing this imports vLLM.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo
from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk, packed_ipc_producer

from dataflow.errors import RunError

_BUFFER_BYTES = 256 << 20
_MEMORY = Path("/dev/shm")


async def send_weights(engine: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Replaces the weights of an ``AsyncLLM``, in which nothing may be in flight, in place.

    Args:
        engine: on a GPU it is built with vLLM's transfer ``ipc``.
        weights: all of them, by Hugging Face name, tied ones once.

    Raises:
        RunError: shared memory is too small. After this or any other error the workers may hold a part of the new
            weights, so the engine must not be used again.
    """
    if engine.vllm_config.weight_transfer_config is None:
        await _send_file(engine, weights)
    else:
        await _send_ipc(engine, weights, range(engine.vllm_config.parallel_config.world_size))


async def _send_file(engine: Any, weights: Mapping[str, torch.Tensor]) -> None:
    memory = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(dir=memory, prefix="dataflow-weights-") as directory:
        file = Path(directory, "model.safetensors")
        tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        try:
            await asyncio.to_thread(save_file, tensors, file)
        except (OSError, SafetensorError) as error:
            size = sum(value.numel() * value.element_size() for value in tensors.values())
            raise RunError(
                f"weight sync: the weights ({size / 2**20:.1f} MiB) cannot be written to {file} ({error}); give "
                f"{file.parents[1]} more room (docker: --shm-size)."
            ) from error
        await engine.collective_rpc("reload_weights", kwargs={"weights_path": directory})
    await engine.collective_rpc("refresh_head")


async def _send_ipc(engine: Any, weights: Mapping[str, torch.Tensor], devices: Sequence[int]) -> None:
    """Sends weights through a buffer on each of these GPUs, whose indices are the same in the workers' process."""
    # They are packed contiguously and read by dtype; with the widest dtype first, all are aligned.
    ordered = sorted(((name, value.detach()) for name, value in weights.items()), key=lambda w: -w[1].element_size())
    sizes = [value.numel() * value.element_size() for _name, value in ordered]
    size = min(sum(sizes), max(_BUFFER_BYTES, *sizes))
    # strict: equal weights in buffers of equal size give equal chunks.
    chunks = zip(*(_chunks(device, ordered, size) for device in devices), strict=True)
    await engine.init_weight_transfer_engine(WeightTransferInitRequest({"packed": True}))
    await engine.start_weight_update()
    # A buffer is reused when the next chunk is requested, so the workers must have loaded the last one by then.
    while (each := await asyncio.to_thread(next, chunks, None)) is not None:
        first = each[0]
        info = IPCWeightTransferUpdateInfo(
            names=first.names,
            dtype_names=first.dtype_names,
            shapes=first.shapes,
            # A worker selects the handle of its own GPU.
            ipc_handles={uuid: handle for chunk in each for uuid, handle in chunk.ipc_handle.items()},
            tensor_sizes=first.tensor_sizes,
        )
        await engine.update_weights(WeightTransferUpdateRequest(asdict(info)))
    await engine.finish_weight_update()
    torch.cuda.ipc_collect()
    # The workers cannot use the buffers' memory while torch's allocator caches it.
    torch.cuda.empty_cache()


def _chunks(device: int, weights: Sequence[tuple[str, torch.Tensor]], size: int) -> Iterator[PackedIpcChunk]:
    producer = packed_ipc_producer(
        iterator=iter(weights),
        gpu_uuid=str(torch.cuda.get_device_properties(device).uuid),
        post_iter_func=lambda item: item[1],
        buffer_size_bytes=size,
    )
    while True:
        with torch.cuda.device(device):  # not around a yield, as the caller would run on that device, too
            chunk = next(producer, None)
        if chunk is None:
            return
        yield chunk
