"""Rollout with vLLM in one process: continuous batching, a shared prefix cache, each sample returned when it ends."""

from __future__ import annotations

import asyncio
import atexit
import importlib
import importlib.util
import os
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import torch

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.choice import refused_temperature
from dataflow.engines.samples import check_sampling, check_tokens, check_turn, prompt_ids, seed_of, shown_of, to_batch
from dataflow.engines.sync_queue import Job, SampleQueue, VllmBackend
from dataflow.engines.vllm.images import image_input, register
from dataflow.engines.vllm.thread import EngineThread
from dataflow.engines.vocabulary import loading, read_vocabulary, undrawn
from dataflow.engines.weights import WeightNames
from dataflow.errors import ConfigError, DataflowError, RunError, nearest
from dataflow.system.children import safe_path
from dataflow.system.loopback import ADDRESS, stay_on_loopback

_DTYPES = ("float32", "bfloat16", "float16")
_RULES = ("wait", "abort")
_ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose sampler `worker.py` changes, on GPUs as well
    "VLLM_NO_USAGE_STATS": "1",
}
_set_num_threads = torch.set_num_threads  # vLLM replaces it by a function that does nothing
_engine = threading.Lock()  # held while an engine is open: closing one of two would break the other


class VllmRollout:
    """A :class:`~dataflow.engines.base.RolloutEngine` over vLLM's ``LLMEngine``.

    One thread steps the engine. A sample is a request of its own with a seed of its own; the n samples of a prompt
    share its entries in the prefix cache, in whole blocks.

    Log-probs are ``log_softmax(logits / temperature)`` of the sampled tokens, with the repetition penalty and before
    the cuts of ``top_p``, ``top_k`` and ``min_p``, at temperature 1 when greedy. None of vLLM's own modes gives that
    (``raw_logprobs`` is at temperature 1, ``processed_logprobs`` after the cuts), so the sampler is changed to report
    it: :class:`~dataflow.engines.vllm.worker.RolloutWorker`.

    A process can hold one such engine at a time, and no trainer besides, since vLLM changes global state (process
    groups, threads, the garbage collector).

    Args:
        model: directory or hub id of a causal LM with its tokenizer.
        max_prompt_length: P, tokens that a prompt may have.
        max_tokens: R, tokens that a response may have.
        threads: CPU threads for its computations.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        device: ``cpu`` or ``cuda``.
        max_num_seqs: samples that are decoded at once; the others are queued.
        kv_cache_bytes: memory for the KV cache; None on a GPU takes what ``gpu_memory`` leaves.
        block_size: tokens per block of the prefix cache.
        prefix_caching: whether samples share the cache entries of common prefixes.
        gpu_memory: the share of the GPU's memory that weights and cache may take.
        max_model_len: tokens of prompt and response together; None for P + R.
        in_flight: what a sync does with samples in flight: ``wait`` lets them finish, ``abort`` restarts them with the
            new weights.
        options: further arguments of vLLM's ``EngineArgs``.

    Raises:
        ConfigError: vLLM is not installed, or not for this device; or a value is out of range.
        ModelError: the model or its tokenizer cannot be loaded, or names no end-of-sequence token.
        RunError: vLLM does not start.
    """

    version: int

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
        block_size: int = 32,
        prefix_caching: bool = True,
        gpu_memory: float = 0.5,
        max_model_len: int | None = None,
        in_flight: Literal["wait", "abort"] = "wait",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        _check_installed(device)
        for name, value, known in (("dtype", dtype, _DTYPES), ("in_flight", in_flight, _RULES)):
            if value not in known:
                hint = nearest(value, known) or f"; give one of {', '.join(known)}."
                raise ConfigError(f"rollout {name} '{value}' is unknown{hint}")
        if min(max_prompt_length, max_tokens, max_num_seqs, threads) < 1:
            raise ConfigError(
                f"rollout: max_prompt_length={max_prompt_length}, max_tokens={max_tokens}, "
                f"max_num_seqs={max_num_seqs}, threads={threads}; each is 1 at least."
            )
        self.vocabulary, self._config = read_vocabulary(model)
        with loading(model):
            self._weights = WeightNames.of_config(self._config)
        positions = getattr(self._config.get_text_config(), "max_position_embeddings", None)
        longest = max_model_len or max_prompt_length + max_tokens
        if positions is not None and longest > positions:
            of = f"max_prompt_length={max_prompt_length} and max_tokens={max_tokens}"
            if max_model_len is not None:
                of = f"prompt and response together, max_model_len={max_model_len},"
            raise ConfigError(
                f"rollout: {of} are more than the {positions} tokens that model '{model}' can read; lower one."
            )
        self.max_prompt_length = max_prompt_length
        self.max_tokens = max_tokens
        self.version = 0
        self._cuda = device == "cuda"
        self._sees = hasattr(self._config, "vision_config")
        self.in_flight = in_flight
        self._to_sleep = False  # the last state requested
        arguments: dict[str, Any] = {
            "model": model,
            "skip_tokenizer_init": not self._sees,  # vLLM measures the largest image with the processor
            "dtype": dtype,
            "max_model_len": longest,
            "max_num_seqs": max_num_seqs,
            "block_size": block_size,
            "enable_prefix_caching": prefix_caching,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "gpu_memory_utilization": gpu_memory,
            "worker_extension_cls": "dataflow.engines.vllm.worker.RolloutWorker",
            "logprobs_mode": "processed_logits",  # the worker extension computes log-probs from it
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            "enforce_eager": not self._cuda,
            "enable_sleep_mode": self._cuda,
        }
        if not self._cuda:
            # Prompts must be processed in one step: for one that is split, vLLM draws once too often and then rewinds
            # the request's random generator, which fails on a CPU.
            arguments["enable_chunked_prefill"] = False
            arguments["max_num_batched_tokens"] = max(4096, longest)
        if self._sees:
            arguments["limit_mm_per_prompt"] = {"video": 0}
            arguments["mm_device_do_normalize"] = False  # the pixels are normalized
            arguments["mm_processor_cache_gb"] = 0  # of what vLLM's own processor makes
        arguments |= options or {}
        if not _engine.acquire(blocking=False):
            raise ConfigError("rollout: this process has a vLLM engine; close it, or give the other its own process.")
        self._queue = SampleQueue()
        before = dict(os.environ)
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(self._workers_apart()))
        _prepare(self._cuda, threads, offline=Path(model).is_dir())
        try:
            _check_platform(device)
            self._backend = self._queue.backend = self._open(arguments, threads)
        except Exception as error:
            self._changed = _changes(before)
            self._leave()
            if isinstance(error, DataflowError):
                raise
            raise RunError(
                f"rollout: vLLM does not start with model '{model}', kv_cache_bytes={kv_cache_bytes}, "
                f"max_num_seqs={max_num_seqs}: {self._why(error)}"
            ) from error
        self._changed = _changes(before)
        # Without close() the thread would be killed inside C++ code when the interpreter ends, which aborts it.
        atexit.register(self._backend.close)

    def _workers_apart(self) -> bool:
        """Whether vLLM's workers get processes of their own."""
        return False

    def _why(self, error: Exception) -> str:
        """Returns why vLLM did not start."""
        return (str(error).strip().splitlines() or [type(error).__name__])[-1]

    def _open(self, arguments: Mapping[str, Any], threads: int) -> VllmBackend:
        """Starts vLLM; ``arguments`` are those of its ``EngineArgs``."""

        def build() -> Any:
            if not self._cuda:
                # Both affect only this thread. Compiling parts of the sampler takes as long as a tiny run.
                _set_num_threads(threads)
                importlib.import_module("torch._dynamo").config.disable = True
            from vllm import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            if self._sees:
                register(self._config)
            with safe_path():
                engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
            engine.collective_rpc("prepare_sampler", args=(undrawn(self._config),))
            return engine

        return EngineThread(build, self._queue, sleeps=self._cuda)

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncIterator[Sample]:
        """See :meth:`RolloutEngine.generate`. A batch of another size may round a logit otherwise, by about 1e-6.

        Closing the generator early (``aclose``, cancellation) aborts the samples in flight.
        """
        self._check(sampling)
        ids = self._ids(prompts)
        inbox: asyncio.Queue[Sample | Exception] = asyncio.Queue()
        shown = [
            None if one is None else image_input(prompt, one, self._config, group)
            for group, prompt, one in zip(prompts.ids, ids, shown_of(prompts, self._sees), strict=True)
        ]
        jobs = [
            Job(group, index, prompt, self._params(sampling, seed_of(seed, group, index)), inbox, one)
            for group, prompt, one in zip(prompts.ids, ids, shown, strict=True)
            for index in range(sampling.n)
        ]
        async with aclosing(self._queue.draw(jobs)) as samples:
            async for sample in samples:
                yield sample

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        """See :meth:`RolloutEngine.sample`."""
        self._check(sampling)
        check_turn(self._sees)
        (ids,) = self._ids(Batch([0], {"prompt_ids": [prompt]}))
        return await self._queue.draw_one(Job(0, 0, ids, self._params(sampling, seed_of(*seed)), asyncio.Queue()))

    def text(self, tokens: Sequence[int]) -> str:
        """See :meth:`Writes.text <dataflow.engines.base.Writes.text>`."""
        return self.vocabulary.text(tokens)

    def batch(self, prompts: Batch, samples: Sequence[Sample], length: int) -> Batch:
        """See :meth:`RolloutEngine.batch`."""
        return to_batch(prompts, samples, length, self.vocabulary.tokenizer, self.vocabulary.pad)

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Loads new weights in place, by Hugging Face name; a tied ``lm_head.weight`` may be left out.

        The constructor's ``in_flight`` applies to samples in flight. Names and shapes are checked first: on an error
        the old weights stay.

        Raises:
            DataflowError: a name is unknown or missing, a shape differs, or two tied weights differ.
            RunError: vLLM failed to load them; the engine is lost.
        """
        picked = list(self._weights.pick(weights, version).items())

        async def work() -> None:
            await self._backend.load(picked)
            self.version = self._queue.version = version

        await self._queue.pause(work, redraw=self.in_flight == "abort")

    async def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`: on a GPU the weights move to the host's memory, and the cache is dropped.

        Samples requested while it sleeps are queued until it wakes.
        """
        self._to_sleep = True
        await self._queue.pause(self._backend.sleep, asleep=self._cuda or None)

    async def wake(self) -> None:
        """See :meth:`RolloutEngine.wake`."""
        if self._to_sleep:
            self._to_sleep = False
            await self._queue.pause(self._backend.wake, asleep=False)

    async def abort(self) -> int:
        """See :meth:`RolloutEngine.abort`; vLLM drops the requests before its next step."""
        return self._queue.abort()

    def stats(self) -> dict[str, float]:
        """See :meth:`RolloutEngine.stats`; adds ``prompt_tokens`` so far, and ``cached_tokens`` of the prefix cache."""
        return {**self._queue.counts, "running": self._queue.unended}

    def close(self) -> None:
        """Aborts the samples in flight, ends the thread and frees the engine. Idempotent."""
        self._queue.close()
        if self._backend.close():
            atexit.unregister(self._backend.close)
            self._leave()

    def _leave(self) -> None:
        """Undoes vLLM's changes to the process; a preloaded library, for one, would be inherited by every child."""
        torch.set_num_threads = _set_num_threads
        for name, value in self._changed.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _engine.release()

    def _check(self, sampling: Sampling) -> None:
        check_sampling(sampling, self.vocabulary.size)
        if sampling.max_tokens > self.max_tokens:
            raise ConfigError(
                f"rollout: max_tokens={sampling.max_tokens} is more than the {self.max_tokens} that the engine "
                "was built for."
            )
        if why := refused_temperature(sampling.temperature, "vllm"):
            raise ConfigError(f"rollout: temperature={sampling.temperature}; {why}.")

    def _ids(self, prompts: Batch) -> list[list[int]]:
        ids = prompt_ids(prompts, self.max_prompt_length)
        # Without a tokenizer vLLM does not check tokens, and an unknown one would end the engine.
        check_tokens(prompts, ids, self.vocabulary.size)
        return ids

    def _params(self, sampling: Sampling, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(0, sampling.top_k),
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_tokens,
            stop_token_ids=[*self.vocabulary.ends, *sampling.stop_token_ids],  # without a tokenizer vLLM has no eos
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )


def _check_installed(device: str) -> None:
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"rollout device '{device}' is unknown; give cpu or cuda (CUDA_VISIBLE_DEVICES says which).")
    extra = "cpu" if device == "cpu" else "gpu"
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(f"engine.rollout=vllm: vLLM is not installed; pip install 'dataflow-rl[{extra}]'.")


def _check_platform(device: str) -> None:
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() if device == "cpu" else current_platform.is_cuda_alike()):
        offers, extra = current_platform.device_type or "none", "cpu" if device == "cpu" else "gpu"
        raise ConfigError(
            f"rollout device '{device}': the vLLM that is installed, or this machine, offers '{offers}'; "
            f"pip install 'dataflow-rl[{extra}]'"
            + (", or set ray.gpus_per_worker=1 to sample on GPUs." if device == "cpu" else ".")
        )


def _prepare(cuda: bool, threads: int, offline: bool) -> None:
    """Sets what vLLM and torch read when they are imported or an engine is built."""
    os.environ |= _ENVIRONMENT
    # An engine's processes are on one machine.
    stay_on_loopback()
    os.environ.setdefault("VLLM_HOST_IP", ADDRESS)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if offline:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not cuda:
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        os.environ["TORCH_COMPILE_DISABLE"] = "1"


def _changes(before: Mapping[str, str]) -> dict[str, str | None]:
    """Returns the old values of the environment variables that have changed, None for new variables."""
    return {name: before.get(name) for name, value in os.environ.items() if before.get(name) != value}
