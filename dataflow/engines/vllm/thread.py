"""The thread that owns vLLM's engine: only this thread uses it, and steps it while there is work."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar

from dataflow.engines.sync_queue import FinishedSample, Job, SampleQueue
from dataflow.errors import DataError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class EngineThread:
    """Steps an ``LLMEngine``; a :class:`~dataflow.engines.sync_queue.VllmBackend` of a queue.

    Commands go to the thread through a queue, on which it blocks while there is nothing to step. Results go back to the
    event loop of the last call.

    Args:
        build: builds the engine, in the thread; its exceptions are raised by the constructor.
        queue: receives the finished samples.
        sleeps: whether the engine has a sleep mode, as on a GPU.
    """

    def __init__(self, build: Callable[[], Any], queue: SampleQueue, sleeps: bool) -> None:
        self._queue = queue
        self._sleeps = sleeps
        self._asleep = False
        self._commands: SimpleQueue[Callable[[Any], None] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure: Exception | None = None
        self._closed = False
        ready: Future[None] = Future()
        # A daemon thread, so that a process can end without close().
        self._thread = threading.Thread(target=self._run, args=(build, ready), name="vllm", daemon=True)
        self._thread.start()
        ready.result()

    def start(self, jobs: Sequence[Job]) -> None:
        """See :meth:`Backend.start`."""
        requests = [(job.id, job.group, input_of(job), job.params) for job in jobs]

        def command(engine: Any) -> None:
            for id, group, prompt, params in requests:
                try:
                    engine.add_request(str(id), prompt, params)
                except ValueError as cause:  # raised for any fault of one request
                    error = DataError(f"rollout: vLLM does not take the prompt of group {group}: {cause}")
                    error.__cause__ = cause
                    self._post(self._queue.on_refused, id, error)

        self._put(command)

    def cancel(self, ids: Sequence[int]) -> None:
        """See :meth:`Backend.cancel`."""
        names = [str(id) for id in ids]
        self._commands.put(lambda engine: engine.abort_request(names))

    async def call(self, work: Callable[[Any], T]) -> T:
        """Calls ``work`` with the engine, between two of its steps; returns its result or raises its exception."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def command(engine: Any) -> None:
            try:
                value = work(engine)
            except Exception as error:
                self._post(_settle, done, None, error)
            else:
                self._post(_settle, done, value, None)

        self._put(command)
        return await done

    async def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """See :meth:`VllmBackend.load`."""

        def work(engine: Any) -> None:
            _let_go(engine)
            if self._asleep:
                engine.wake_up(tags=["weights"])
            engine.collective_rpc("take_weights", args=(weights,))
            # A sleeping engine has no cache to reset.
            if not self._asleep:
                engine.reset_encoder_cache()  # of images, by the old weights
                if not engine.reset_prefix_cache():
                    raise RuntimeError("the prefix cache could not be reset: blocks are still in use")

        await self.call(work)

    async def sleep(self) -> None:
        """See :meth:`VllmBackend.sleep`."""

        def work(engine: Any) -> None:
            _let_go(engine)
            if self._asleep:
                engine.wake_up()  # a sync has woken the weights alone
            if self._sleeps:
                engine.sleep(level=1)
                self._asleep = True

        await self.call(work)

    async def wake(self) -> None:
        """See :meth:`VllmBackend.wake`."""

        def work(engine: Any) -> None:
            if self._asleep:
                engine.wake_up()
                self._asleep = False

        await self.call(work)

    def close(self) -> bool:
        """Ends the thread after its current step and frees the engine; returns True the first time."""
        first, self._closed = not self._closed, True
        self._commands.put(None)
        self._thread.join()
        return first

    def _put(self, command: Callable[[Any], None]) -> None:
        # In this order, since the thread sets its failure before it reads the loop to report it to.
        self._loop = asyncio.get_running_loop()
        if self._failure is not None:
            raise self._failure
        self._commands.put(command)

    def _post(self, callback: Callable[..., None], *args: Any) -> None:
        # A closed loop has no waiters left.
        with suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(callback, *args)

    def _run(self, build: Callable[[], Any], ready: Future[None]) -> None:
        try:
            engine = build()
        except BaseException as error:
            ready.set_exception(error)
            return
        ready.set_result(None)
        try:
            self._step(engine)
        except Exception as error:
            self._failure = error
            self._post(self._queue.fail, error)
        finally:
            engine.engine_core.shutdown()

    def _step(self, engine: Any) -> None:
        while True:
            wait = not has_work(engine)
            while True:
                try:
                    command = self._commands.get(block=wait)
                except Empty:
                    break
                if command is None:
                    return
                command(engine)
                wait = False
            if has_work(engine):
                drawn = [drawn_of(output) for output in engine.step() if output.finished]
                if drawn:
                    self._post(self._queue.on_finished, drawn)


def has_work(engine: Any) -> bool:
    """Whether a step would do anything; freeing finished requests counts."""
    core = engine.engine_core.engine_core
    return engine.has_unfinished_requests() or core.scheduler.has_requests() or bool(core.batch_queue)


def _let_go(engine: Any) -> None:
    """Steps until the engine has dropped the aborted requests."""
    while has_work(engine):
        engine.step()


def input_of(job: Job) -> dict[str, Any]:
    """Returns a job's prompt as an ``EngineInput`` of vLLM."""
    kind = "multimodal" if job.shown else "token"
    return {"type": kind, "prompt_token_ids": job.prompt, **(job.shown or {})}


def drawn_of(output: Any) -> FinishedSample:
    """Returns a finished ``RequestOutput`` as a sample.

    Raises:
        RuntimeError: it ended for a reason other than stop or length.
    """
    (one,) = output.outputs
    if one.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"vLLM ended request {output.request_id} with '{one.finish_reason}'.")
    log_probs = list(one.logprobs.logprobs)
    if len(log_probs) != len(one.token_ids):
        raise RuntimeError(f"vLLM gave {len(log_probs)} log-probs for {len(one.token_ids)} tokens.")
    return FinishedSample(
        int(output.request_id), list(one.token_ids), log_probs, one.finish_reason, output.num_cached_tokens or 0
    )


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return  # the caller was cancelled
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
