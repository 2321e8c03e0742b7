"""Rollout with vLLM in processes of its own: several GPUs for one model, and an interpreter for it alone."""

from __future__ import annotations

import asyncio
import os
import re
import stat
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import torch

from dataflow.engines.sync_queue import Job, SampleQueue, VllmBackend
from dataflow.engines.vllm.in_process import VllmRollout
from dataflow.engines.vllm.thread import drawn_of, input_of
from dataflow.engines.vocabulary import undrawn
from dataflow.errors import ConfigError, DataError
from dataflow.system.children import safe_path

_ERROR = re.compile(r"(?<![\w.])[\w.]*+(?:(?<=Error)|(?<=Exception)): .+$", re.MULTILINE)
_ELSEWHERE = re.compile(r"root cause|initialization failed", re.IGNORECASE)


class AsyncVllmRollout(VllmRollout):
    """A :class:`~dataflow.engines.base.RolloutEngine` over vLLM's ``AsyncLLM``.

    It samples as :class:`VllmRollout` does, which documents the other arguments. All calls must be made on the same
    event loop. New weights go to the workers through vLLM's own weight transfer
    (:mod:`dataflow.engines.vllm.transfer`): CUDA IPC on GPUs, shared memory on a CPU.

    Args:
        tensor_parallel: number of GPUs (on a CPU: processes) that the model is split over.

    Raises:
        ConfigError: ``tensor_parallel`` does not divide the model's heads.
    """

    def __init__(self, *args: Any, tensor_parallel: int = 1, **options: Any) -> None:
        self._tensor_parallel = tensor_parallel
        self._stderr = Stderr()
        super().__init__(*args, **options)

    def _workers_apart(self) -> bool:
        # Else the engine's process computes itself: a worker beside it is one more process that imports vLLM. Its
        # threads are bound by the environment that it inherits.
        return self._cuda or self._tensor_parallel > 1

    def _open(self, arguments: Mapping[str, Any], threads: int) -> VllmBackend:
        heads = self._config.get_text_config().num_attention_heads
        if self._tensor_parallel < 1 or heads % self._tensor_parallel:
            raise ConfigError(
                f"engine.tensor_parallel={self._tensor_parallel} does not divide the model's {heads} attention heads."
            )
        if not self._cuda:
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the processes may share the cores
        else:
            # Handles of GPU memory are torch objects, which only pickle can send to the engine's process.
            os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from dataflow.engines.vllm.transfer import backend

        wanted = {
            **arguments,
            "tensor_parallel_size": self._tensor_parallel,
            # In a placement group, as used for shared GPUs, vLLM would start Ray actors that need a whole GPU each,
            # which is not available.
            **({"distributed_executor_backend": "mp"} if self._tensor_parallel > 1 else {}),
            "enable_log_requests": False,
            "weight_transfer_config": {"backend": backend(self._cuda)},
        }
        with safe_path():
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**wanted))
        return EngineProcess(engine, self._queue, self._stderr, self._cuda, undrawn(self._config))

    def _why(self, error: Exception) -> str:
        return self._stderr.root_cause() or super()._why(error)


class Stderr:
    """The output of this process and its children to stderr, if stderr is a file, as in Ray's workers.

    vLLM's processes write the reason for their exit there; the error of the call states only that they exited.
    """

    def __init__(self) -> None:
        self._since = os.fstat(2).st_size if self._is_file() else 0

    @staticmethod
    def _is_file() -> bool:
        try:
            return stat.S_ISREG(os.fstat(2).st_mode)
        except OSError:  # closed
            return False

    def root_cause(self) -> str:
        """Returns the last error in it that does not refer to another cause, or ""."""
        if not self._is_file():
            return ""
        try:
            with open("/proc/self/fd/2", encoding="utf-8", errors="replace") as file:
                file.seek(self._since)
                found = [match[0].strip() for match in _ERROR.finditer(file.read())]
        except OSError:  # this system does not have it
            return ""
        return next((text for text in reversed(found) if not _ELSEWHERE.search(text)), "")

    def explained(self, error: Exception) -> Exception:
        """Returns the error or, if it only refers to a root cause, an error with that."""
        reason = self.root_cause() if _ELSEWHERE.search(str(error)) else ""
        if not reason:
            return error
        explained = RuntimeError(f"its process ended: {reason}")
        explained.__cause__ = error
        return explained


class EngineProcess:
    """Samples with an ``AsyncLLM``; a :class:`~dataflow.engines.sync_queue.VllmBackend` of a queue.

    Args:
        engine: the ``AsyncLLM``.
        queue: receives the finished samples.
        stderr: of the processes.
        sleeps: whether the engine has a sleep mode, as on a GPU.
        undrawn: tokens that are never drawn.
    """

    def __init__(
        self, engine: Any, queue: SampleQueue, stderr: Stderr, sleeps: bool, undrawn: Sequence[int] = ()
    ) -> None:
        self._engine = engine
        self._undrawn = list(undrawn)
        self._queue = queue
        self._stderr = stderr
        self._sleeps = sleeps
        self._asleep = False
        self._closed = False
        self._prepared: asyncio.Future[Any] | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._cancelled: list[asyncio.Task[None]] = []

    def start(self, jobs: Sequence[Job]) -> None:
        """See :meth:`Backend.start`."""
        for job in jobs:
            self._tasks[job.id] = asyncio.ensure_future(self._draw(job.id, job))

    def cancel(self, ids: Sequence[int]) -> None:
        """See :meth:`Backend.cancel`."""
        for id in ids:
            task = self._tasks.pop(id)
            task.cancel()
            self._cancelled.append(task)
        self._cancelled = [task for task in self._cancelled if not task.done()]

    async def _draw(self, id: int, job: Job) -> None:
        prompt = input_of(job)
        try:
            await self._ready()
            (output,) = [output async for output in self._engine.generate(prompt, job.params, str(id))]
            drawn = drawn_of(output)
        except ValueError as cause:  # raised for any fault of one request
            error = DataError(f"rollout: vLLM does not take the prompt of group {job.group}: {cause}")
            error.__cause__ = cause
            self._tasks.pop(id, None)
            self._queue.on_refused(id, error)
        except Exception as error:
            self._queue.fail(self._stderr.explained(error))
        else:
            self._tasks.pop(id, None)
            self._queue.on_finished([drawn])

    async def _ready(self) -> None:
        """Prepares the sampler before the first sample; the constructor cannot, as it may run without a loop."""
        if self._prepared is None:
            work = self._engine.collective_rpc("prepare_sampler", args=(self._undrawn,))
            self._prepared = asyncio.ensure_future(work)
        await asyncio.shield(self._prepared)

    async def _let_go(self) -> None:
        """Waits until the engine has dropped the cancelled requests."""
        await asyncio.gather(*self._cancelled, return_exceptions=True)
        await self._engine.pause_generation(mode="abort", clear_cache=True)

    async def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`VllmBackend.load`."""
        from dataflow.engines.vllm.transfer import send

        async def work() -> None:
            await self._let_go()
            if self._asleep:
                await self._engine.wake_up(tags=["weights"])
            await send(self._engine, weights)
            if not self._asleep:
                await self._engine.resume_generation()

        await self._while_alive(work())

    async def sleep(self) -> None:
        """See :meth:`VllmBackend.sleep`."""

        async def work() -> None:
            await self._let_go()
            if self._asleep:
                await self._engine.wake_up()  # a sync has woken the weights alone
            await self._engine.sleep(level=1)
            self._asleep = True

        if self._sleeps:
            await self._while_alive(work())

    async def wake(self) -> None:
        """See :meth:`VllmBackend.wake`."""

        async def work() -> None:
            await self._engine.wake_up()
            await self._engine.resume_generation()
            self._asleep = False

        if self._asleep:
            await self._while_alive(work())

    async def _while_alive(self, work: Coroutine[Any, Any, None]) -> None:
        """Awaits calls of the engine, and fails if its process dies, where vLLM would never return.

        Raises:
            EngineDeadError: vLLM's; the process died.
        """
        self._engine._run_output_handler()  # does nothing if it runs; it ends when the process dies
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task, self._engine.output_handler}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise self._engine.dead_error
            await task
        finally:
            task.cancel()

    def close(self) -> bool:
        """See :meth:`VllmBackend.close`."""
        first, self._closed = not self._closed, True
        if first:
            for task in self._tasks.values():
                if not task.get_loop().is_closed():
                    task.cancel()
            self._engine.shutdown()
        return first
