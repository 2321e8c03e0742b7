"""The sending side of a weight sync with an ``AsyncLLM``, over vLLM's own weight transfer.

On GPUs it uses vLLM's ``ipc``: weights are packed into a buffer on each GPU, which the worker there maps, so that a GPU
needs no more memory than the buffer. On a CPU it uses a backend of this package: one file in shared memory, which each
worker maps and loads its share from (:class:`~dataflow.engines.vllm.worker.FileTransfer`).

Importing this imports vLLM.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from vllm.distributed.weight_transfer import ParamMeta, VLLMWeightSyncClient, WeightSource
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine
from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk, packed_ipc_producer

from dataflow.engines.vllm.worker import FILE
from dataflow.errors import RunError

IPC = "ipc"
_BUFFER_BYTES = 256 << 20
_MEMORY = Path("/dev/shm")


def backend(cuda: bool) -> str:
    """Returns the ``backend`` of vLLM's ``WeightTransferConfig``."""
    return IPC if cuda else FILE


async def send(engine: Any, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Replaces the weights of a running ``AsyncLLM``, in which nothing may be in flight, in place.

    Args:
        engine: built with a ``weight_transfer_config`` of :func:`backend`.
        weights: all of them, by Hugging Face name, tied ones once.

    Raises:
        RunError: shared memory is too small, or a worker failed; it may then hold a part of the new weights, so the
            engine must not be used again.
    """
    client, source = Client(engine), Weights(weights)
    parallel = engine.vllm_config.parallel_config

    def work() -> None:
        if engine.vllm_config.weight_transfer_config.backend == FILE:
            send_file(client, source)
        else:
            send_ipc(client, source, range(parallel.world_size), _BUFFER_BYTES)

    try:
        await asyncio.to_thread(work)
    finally:
        client.stop()


class Weights(WeightSource):
    """Weights in memory as a source for vLLM's senders, which read them once per GPU."""

    def __init__(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        # They are packed contiguously and read by dtype; with the widest dtype first, all are aligned.
        self._weights = sorted(weights, key=lambda item: -item[1].element_size())

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in self._weights]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value.detach()) for name, value in self._weights)

    def sizes(self) -> list[int]:
        """Returns the size of each in bytes."""
        return [value.numel() * value.element_size() for _name, value in self._weights]


class Client:
    """Calls of a sender to an ``AsyncLLM`` (vLLM's ``VLLMWeightSyncClient``), from a thread other than its loop's.

    Constructed on the loop. Each method returns once all workers have answered.

    Raises:
        RunError: a worker or the engine failed.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._asked: concurrent.futures.Future[None] | None = None
        self._stopped = False

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._ask("init_weight_transfer_engine", WeightTransferInitRequest(init_info=init_info))

    def start_weight_update(self) -> None:
        self._ask("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._ask("update_weights", WeightTransferUpdateRequest(update_info=update_info))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._ask("finish_weight_update", weight_version)

    def stop(self) -> None:
        """Makes the current call and all later ones fail, as a closed engine does not answer."""
        self._stopped = True
        if self._asked is not None:
            self._asked.cancel()

    def _ask(self, step: str, *args: Any) -> None:
        # In this order, since stop() sets its flag before it reads which future to cancel.
        self._asked = asyncio.run_coroutine_threadsafe(getattr(self._engine, step)(*args), self._loop)
        if self._stopped:
            self._asked.cancel()
        try:
            self._asked.result()
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RunError(f"weight sync: {step} failed: {reason}") from error


def send_file(client: VLLMWeightSyncClient, source: Weights) -> None:
    """Sends weights through a file in shared memory, which is unlinked once all workers have mapped it.

    Raises:
        RunError: shared memory is too small, or a worker failed.
    """
    memory = _MEMORY if _MEMORY.is_dir() else None
    with tempfile.NamedTemporaryFile(dir=memory, prefix="dataflow-weights-", suffix=".safetensors") as file:
        try:
            save_file({name: value.cpu().contiguous() for name, value in source}, file.name)
        except (OSError, SafetensorError) as error:
            raise RunError(
                f"weight sync: the weights ({sum(source.sizes()) / 2**20:.1f} MiB) cannot be written to {file.name} "
                f"({error}); give {Path(file.name).parent} more room (docker: --shm-size)."
            ) from error
        client.start_weight_update()
        client.update_weights({"path": file.name})
    client.finish_weight_update()


def send_ipc(client: VLLMWeightSyncClient, source: Weights, devices: Sequence[int], buffer_bytes: int) -> None:
    """Sends weights through a buffer on each of these GPUs, and frees the buffers.

    Args:
        client: of an engine whose workers are on these GPUs, one on each.
        source: the weights.
        devices: indices of the GPUs, the same here as in the workers' process.
        buffer_bytes: the maximum size of a buffer, unless one weight alone is larger.

    Raises:
        RunError: a worker failed.
    """
    sizes = source.sizes()
    size = min(sum(sizes), max(buffer_bytes, *sizes))
    info = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=size)
    sender = IpcSender.trainer_init(info, client=client, source=source)
    sender.devices = devices
    sender.send_weights()
    # The workers cannot use the buffers' memory while torch's allocator caches it.
    torch.cuda.empty_cache()


class IpcSender(IPCTrainerWeightTransferEngine):
    """vLLM's sender, for workers on several GPUs.

    A worker selects the handle of its own GPU. vLLM's sender sends only the handle of its own GPU, and expects a rank
    of the trainer on each. Here one process sends those of all GPUs.
    """

    devices: Sequence[int] = (0,)

    def _send_packed(self, source: WeightSource) -> None:
        # A buffer is reused when the next chunk is requested, so the workers must have loaded the last one by then.
        # strict: equal weights in buffers of equal size give equal chunks.
        for chunks in zip(*(self._chunks(device, source) for device in self.devices), strict=True):
            first = chunks[0]
            self._do_send(
                names=first.names,
                dtype_names=first.dtype_names,
                shapes=first.shapes,
                ipc_handles={uuid: handle for chunk in chunks for uuid, handle in chunk.ipc_handle.items()},
                tensor_sizes=first.tensor_sizes,
            )

    def _chunks(self, device: int, source: WeightSource) -> Iterator[PackedIpcChunk]:
        producer = packed_ipc_producer(
            iterator=iter(source),
            gpu_uuid=str(torch.cuda.get_device_properties(device).uuid),
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self.packed_buffer_size_bytes,
        )
        while True:
            with torch.cuda.device(device):  # not around a yield, as the caller would run on that device, too
                chunk = next(producer, None)
            if chunk is None:
                return
            yield chunk
