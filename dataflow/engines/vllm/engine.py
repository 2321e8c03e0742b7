"""Rollout with vLLM's ``AsyncLLM``: continuous batching, a shared prefix cache, each sample returned when it ends.

Where the weights go: :meth:`VllmRollout._load` pauses the engine, drops the prefix cache of the old ones, and sends the
new ones to vLLM's workers (:func:`send_weights`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from dataflow.engines.base import Sample
from dataflow.engines.pretrained import undrawn
from dataflow.engines.rollout import Request, Rollout
from dataflow.engines.samples import seed_of
from dataflow.engines.vllm.images import MODEL, image_input, register
from dataflow.errors import DataError, RunError
from dataflow.system.loopback import ADDRESS, stay_on

_ERROR = re.compile(r"(?<![\w.])[\w.]*+(?:(?<=Error)|(?<=Exception)): .+$", re.MULTILINE)
_ELSEWHERE = re.compile(r"root cause|initialization failed", re.IGNORECASE)
_BUFFER_BYTES = 256 << 20
_MEMORY = Path("/dev/shm")


class VllmRollout(Rollout):
    """A :class:`~dataflow.engines.base.RolloutEngine` over vLLM's ``AsyncLLM``; all calls are made on one event loop.

    A sample is a request of its own with a seed of its own; the n samples of a prompt share its entries in the prefix
    cache, in whole blocks.

    Log-probs are ``log_softmax(logits / temperature)`` of the sampled tokens, before the cuts of ``top_p`` and
    ``top_k``, at temperature 1 when greedy. None of vLLM's own modes gives that (``raw_logprobs`` is at temperature 1,
    ``processed_logprobs`` after the cuts), so the sampler is changed to report it:
    :class:`~dataflow.engines.vllm.worker.RolloutWorker`.

    Args:
        model, max_prompt_length, in_flight: see :class:`~dataflow.engines.rollout.Rollout`, as for errors.
        max_tokens: R, tokens that a response may have.
        threads: CPU threads for its computations.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``cpu`` or ``cuda``.
        max_num_seqs: samples that are decoded at once; the others are queued.
        kv_cache_bytes: memory for the KV cache; None on a GPU takes what ``gpu_memory`` leaves.
        gpu_memory: the share of the GPU's memory that weights and cache may take.
        max_model_len: tokens of prompt and response together; None for P + R.
        tensor_parallel: number of GPUs (on a CPU: processes) that the model is split over.

    Raises:
        RunError: vLLM does not start.
    """

    def __init__(
        self,
        model: str,
        max_prompt_length: int,
        max_tokens: int,
        threads: int = 1,
        dtype: str = "float32",
        device: str = "cpu",
        max_num_seqs: int = 256,
        kv_cache_bytes: int | None = 256 << 20,
        gpu_memory: float = 0.5,
        max_model_len: int | None = None,
        tensor_parallel: int = 1,
        in_flight: Literal["wait", "abort"] = "wait",
    ) -> None:
        cuda = device == "cuda"
        super().__init__(model, max_prompt_length, "vLLM", cuda, in_flight)
        longest = max_model_len or max_prompt_length + max_tokens
        arguments: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": not self._sees,  # vLLM measures the largest image with the processor
            "dtype": dtype,
            "max_model_len": longest,
            "max_num_seqs": max_num_seqs,
            "block_size": 32,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "gpu_memory_utilization": gpu_memory,
            "tensor_parallel_size": tensor_parallel,
            "worker_extension_cls": "dataflow.engines.vllm.worker.RolloutWorker",
            "logprobs_mode": "processed_logits",  # the worker extension computes log-probs from it
            "disable_log_stats": True,
            "enable_log_requests": False,
            "use_tqdm_on_load": False,
            "enforce_eager": not cuda,
            "enable_sleep_mode": cuda,
        }
        if tensor_parallel > 1:
            # In a placement group, as used for shared GPUs, vLLM would start Ray actors that need a whole GPU each,
            # which is not available.
            arguments["distributed_executor_backend"] = "mp"
        if cuda:
            arguments["weight_transfer_config"] = {"backend": "ipc"}
        else:
            # Prompts must be processed in one step: for one that is split, vLLM draws once too often and then rewinds
            # the request's random generator, which fails on a CPU.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(4096, longest)
        if self._sees:
            arguments["limit_mm_per_prompt"] = {"video": 0}
            arguments["mm_device_do_normalize"] = False  # the pixels are normalized
            arguments["mm_processor_cache_gb"] = 0  # of what vLLM's own processor makes
        self._asleep = False
        self._prepared = False
        self._names = itertools.count()
        self._stderr = _stderr_size()
        _set_environment(cuda, threads, tensor_parallel, offline=Path(model).is_dir())
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        if self._sees and importlib.util.find_spec("torchvision") is None:
            os.environ[MODEL] = model  # for vLLM's processes
            register(self._config)
        try:
            self._engine: Any = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:
            raise RunError(
                f"rollout: vLLM does not start with model '{model}', kv_cache_bytes={kv_cache_bytes}, "
                f"max_num_seqs={max_num_seqs}: {self._root_cause() or ' '.join(str(error).split())}"
            ) from error

    async def _ready(self) -> None:
        """Prepares the sampler before the first sample; the constructor cannot, as it may run without a loop."""

        async def work() -> None:
            await self._while_alive(self._engine.collective_rpc("prepare_sampler", args=(undrawn(self._config),)))
            self._prepared = True

        if not self._prepared:
            await self._gate.alone(work)

    def _shown(self, prompt: list[int], shown: Any, group: int) -> Any:
        return None if shown is None else image_input(prompt, shown, self._config, group)

    async def _draw(self, request: Request) -> Sample:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.sampling_params import RequestOutputKind

        version, sampling = self.version, request.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
            max_tokens=sampling.max_tokens,
            stop_token_ids=[*self.vocabulary.ends, *sampling.stop_token_ids],  # without a tokenizer vLLM has no eos
            seed=seed_of(*request.seed),
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt: Any = {"type": "token", "prompt_token_ids": request.prompt}
        if request.shown:
            prompt |= {"type": "multimodal", **request.shown}
        try:
            (output,) = [output async for output in self._engine.generate(prompt, params, str(next(self._names)))]
        except VLLMClientError as error:
            raise DataError(f"rollout: vLLM does not take the prompt of group {request.group}: {error}") from error
        found: Any = output.outputs[0]
        if found.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"a request ended with '{found.finish_reason}'")
        log_probs = list(found.logprobs.logprobs)
        tokens = list(found.token_ids)
        return Sample(request.group, request.index, tokens, log_probs, version, found.finish_reason)

    async def _load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        async def work() -> None:
            await self._engine.pause_generation(mode="abort", clear_cache=True)  # nothing is in flight
            if self._asleep:
                await self._engine.wake_up(tags=["weights"])
            await send_weights(self._engine, weights)
            if not self._asleep:
                await self._engine.resume_generation()

        await self._while_alive(work())

    async def _free(self) -> None:
        async def work() -> None:
            if self._asleep:
                await self._engine.wake_up()  # a sync has woken the weights alone
            await self._engine.sleep(level=1)
            self._asleep = True

        await self._while_alive(work())

    async def _allocate(self) -> None:
        async def work() -> None:
            await self._engine.wake_up()
            await self._engine.resume_generation()
            self._asleep = False

        await self._while_alive(work())

    async def _while_alive(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Awaits calls of the engine, and fails if its process dies, where vLLM would never return."""
        self._engine._run_output_handler()  # does nothing if it runs; it ends when the process dies
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._engine.output_handler}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._engine.dead_error
            return await task
        finally:
            task.cancel()

    def _lost(self, cause: Exception) -> str | None:
        reason = self._root_cause() if _ELSEWHERE.search(str(cause)) else ""
        return super()._lost(RuntimeError(f"its process ended: {reason}") if reason else cause)

    def _root_cause(self) -> str:
        """Returns the last error on stderr, if that is a file, as in Ray's workers, that does not refer to another one.

        vLLM's processes write there why they ended; the error of a call only says that they did.
        """
        if self._stderr is None:
            return ""
        with open("/proc/self/fd/2", encoding="utf-8", errors="replace") as file:
            file.seek(self._stderr)
            found = [match[0].strip() for match in _ERROR.finditer(file.read())]
        return next((text for text in reversed(found) if not _ELSEWHERE.search(text)), "")

    def close(self) -> None:
        """Aborts the samples in flight and ends vLLM's processes. Idempotent."""
        self._gate.close()
        self._engine.shutdown()


async def send_weights(engine: Any, weights: Mapping[str, torch.Tensor]) -> None:
    """Replaces the weights of an ``AsyncLLM``, in which nothing may be in flight, in place.

    On GPUs by vLLM's weight transfer by CUDA IPC: weights are packed into a buffer on each GPU, which the worker there
    maps, so that a GPU needs no more memory than the buffer. On a CPU, where vLLM has no transfer, its workers reload
    the weights from a file in shared memory.

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
    from safetensors import SafetensorError
    from safetensors.torch import save_file

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
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferUpdateInfo

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


def _chunks(device: int, weights: Sequence[tuple[str, torch.Tensor]], size: int) -> Iterator[Any]:
    from vllm.distributed.weight_transfer.packed_tensor import packed_ipc_producer

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


def _stderr_size() -> int | None:
    """Returns the size of the file that stderr goes to; None if it goes elsewhere."""
    try:
        found = os.fstat(2)
    except OSError:  # closed
        return None
    return found.st_size if stat.S_ISREG(found.st_mode) and os.path.exists("/proc/self/fd/2") else None


def _set_environment(cuda: bool, threads: int, tensor_parallel: int, offline: bool) -> None:
    """Sets what vLLM and torch read when they are imported, or its processes start, which inherit it."""
    os.environ |= {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler `worker.py` changes, on GPUs as well
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Without workers apart, the engine's process computes: a worker beside it is one more that imports vLLM.
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(cuda or tensor_parallel > 1)),
    }
    # An engine's processes are on one machine.
    stay_on(ADDRESS)
    os.environ.setdefault("VLLM_HOST_IP", ADDRESS)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if cuda:
        # Handles of GPU memory are torch objects, which only pickle can send to the engine's process.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    else:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ["TORCH_COMPILE_DISABLE"] = "1"
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the processes may share the cores
