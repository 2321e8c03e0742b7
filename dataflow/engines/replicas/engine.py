"""Several rollout engines as one: each in its own Ray actor, with the prompts balanced over them.

Groups are sent as a whole, since the samples of a group share their prompt in an engine's cache;
:mod:`dataflow.engines.replicas.balance` chooses the replica.

A queue (:mod:`dataflow.engines.sync_queue`) keeps the order: a sync begins when all earlier requests have finished on
all replicas, and later requests wait until every replica has the new weights. So a sample's version is exact,
whichever replica it comes from.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from dataflow.batch import Batch
from dataflow.engines.base import RolloutEngine, Sample, Sampling
from dataflow.engines.replicas.balance import Balance, ReplicaHandle, reason
from dataflow.engines.replicas.host import Replica, pack
from dataflow.engines.sync_queue import Job, SampleQueue, SamplingCall, jobs_of
from dataflow.errors import ConfigError, RunError, UserError
from dataflow.executors.ray.nodes import NodeRule, Places
from dataflow.executors.ray.paths import SharedPaths, Where

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_BUILD_S = 600.0
_CLOSE_S = 20.0


class Replicas:
    """A :class:`~dataflow.engines.base.RolloutEngine` over several engines, each in its own process.

    A sample depends on its seed alone, so the samples equal those of a single engine. When a replica's process dies,
    all current and later calls raise :class:`ServiceLost`, and the engine has to be rebuilt. All calls that are in
    flight at the same time must come from one event loop.

    Args:
        factory: ``"package.module:name"`` of a function that builds an engine, or a function that can be pickled.
        options: its keyword arguments, the same for each; ``model`` and ``max_prompt_length`` are read here, too. With
            ``in_flight="abort"`` a sync repeats all samples in flight, as whole groups.
        replicas: number of engines.
        gpus: GPUs of each, or the share of one.
        devices: GPUs that each has ``gpus`` of.
        threads: OMP threads of each.
        slots: samples that a replica decodes at once (vLLM's ``max_num_seqs``); it gets no group while it has that
            many.
        nodes: of the cluster that they run on; None leaves them to Ray.
        paths: that every engine reads, where their nodes are compared with this process's; None on one machine.

    Raises:
        ConfigError: a number is out of range, Ray does not run, a node does not see a path or has another version of
            this package, or the factory raises it.
        ModelError: the model cannot be loaded.
        RunError: a replica does not start.
    """

    version: int

    def __init__(
        self,
        factory: str | Callable[..., RolloutEngine],
        options: Mapping[str, Any],
        replicas: int,
        gpus: float = 0.0,
        devices: int = 1,
        threads: int = 1,
        slots: int = 256,
        nodes: NodeRule | None = None,
        paths: SharedPaths | None = None,
    ) -> None:
        import ray

        if min(replicas, devices, threads, slots) < 1 or gpus < 0:
            raise ConfigError(
                f"rollout: replicas={replicas}, devices={devices}, threads={threads}, slots={slots}, gpus={gpus}; "
                "give 1 or more of each, and 0 or more GPUs."
            )
        if not ray.is_initialized():
            raise ConfigError(f"engine.replicas={replicas}: Ray does not run here; use executor=ray, or one replica.")
        self.version = 0
        self._redraw = options.get("in_flight") == "abort"
        self._longest = int(options["max_prompt_length"])
        self._to_sleep = self._closed = False
        self._queue = SampleQueue(_lost)
        kind = ray.remote(Replica)
        self._places = Places(replicas, gpus, devices, nodes)
        self._handles = [
            ReplicaHandle(f"replica {at + 1} of {replicas}", kind.options(**options_, max_concurrency=1000).remote())
            for at, options_ in enumerate(self._places.options)
        ]
        self._balance = self._queue.backend = Balance(self._handles, slots, self._queue)
        environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        try:
            # No ray.get: this may be the thread of an event loop, as in an actor.
            if paths is not None:
                self._check(paths)
            built = [
                replica.actor.build.remote(factory, dict(options), environment, *seen).future()
                for replica, seen in zip(self._handles, self._places.seen, strict=True)
            ]
            self._read(str(options["model"]))
            self._wait_for(built)
        except BaseException:
            self._kill()
            raise

    def _read(self, model: str) -> None:
        """Reads the model's tokenizer and configuration while the engines start."""
        from dataflow.engines.vocabulary import read_vocabulary

        self.vocabulary, _config = read_vocabulary(model)

    def _check(self, paths: SharedPaths) -> None:
        """Compares the replicas' nodes with this one."""
        import ray

        where: list[Where] = self._wait_for([replica.actor.where.remote().future() for replica in self._handles])
        here = ray.get_runtime_context().get_node_id()
        checked = paths.check([replica.actor for replica in self._handles], where, here)
        with concurrent.futures.ThreadPoolExecutor(1) as thread:  # this one's loop may wait for this call
            thread.submit(asyncio.run, checked).result()

    def _wait_for(self, answers: Sequence[concurrent.futures.Future[T]]) -> list[T]:
        """Returns the answer of each replica; raises the first failure."""
        done, late = concurrent.futures.wait(answers, _BUILD_S, concurrent.futures.FIRST_EXCEPTION)
        for replica, future in zip(self._handles, answers, strict=True):
            if future in done and (error := future.exception()) is not None:
                why = reason(replica.name, error)
                raise why if isinstance(why, UserError) else RunError(f"rollout: {why}") from error
        if late:
            names = ", ".join(
                replica.name for replica, future in zip(self._handles, answers, strict=True) if future in late
            )
            raise RunError(f"rollout: not up after {_BUILD_S:g} s: {names}; see 'ray status'.")
        return [answer.result() for answer in answers]

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncIterator[Sample]:
        """See :meth:`RolloutEngine.generate`. Closing the generator aborts its samples on all replicas."""
        ids = self._checked(prompts, sampling)
        jobs = jobs_of(prompts.ids, ids, sampling, seed)
        async with contextlib.aclosing(self._queue.draw(jobs)) as samples:
            async for sample in samples:
                yield sample

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        """See :meth:`RolloutEngine.sample`; balanced as a group of one."""
        (ids,) = self._checked(Batch([0], {"prompt_ids": [prompt]}), sampling)
        return await self._queue.draw_one(Job(0, 0, ids, SamplingCall(sampling, tuple(seed)), asyncio.Queue()))

    def _checked(self, prompts: Batch, sampling: Sampling) -> list[list[int]]:
        """Returns the token ids of each prompt; raises what every engine would, before a sample is drawn."""
        from dataflow.engines.samples import check_sampling, prompt_ids

        check_sampling(sampling, self.vocabulary.size)
        return prompt_ids(prompts, self._longest)

    def text(self, tokens: Sequence[int]) -> str:
        """See :meth:`Writes.text <dataflow.engines.base.Writes.text>`."""
        return self.vocabulary.text(tokens)

    def batch(self, prompts: Batch, samples: Sequence[Sample], length: int) -> Batch:
        """See :meth:`RolloutEngine.batch`."""
        from dataflow.engines.samples import to_batch

        return to_batch(prompts, samples, length, self.vocabulary.tokenizer, self.vocabulary.pad)

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Sends new weights to all replicas through Ray's store; ``version`` changes when all have loaded them.

        Raises:
            DataflowError: all refused them, because of a name or shape; the old weights stay.
            RunError: a replica did not load them, or died; as replicas may now hold different weights, all are lost.
        """
        import ray

        refused: list[Exception] = []
        # In a thread, while the samples in flight finish.
        sent = await asyncio.to_thread(lambda: ray.put(pack(weights)))

        async def work() -> None:
            await self._balance.settled()
            errors = await self._call("sync", sent, version)
            if len(errors) == len(self._handles) and not any(isinstance(error, RunError) for error in errors.values()):
                refused.extend(errors.values())
            elif errors:
                (name, error), *_others = errors.items()
                raise RunError(f"weight sync {version}: {name} does not have the new weights: {error}") from error
            else:
                self.version = self._queue.version = version

        await self._queue.pause(work, redraw=self._redraw)
        if refused:
            raise refused[0]

    async def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`. Samples requested while it sleeps are queued until it wakes."""
        self._to_sleep = True
        await self._queue.pause(lambda: self._all("sleep"), asleep=True)

    async def wake(self) -> None:
        """See :meth:`RolloutEngine.wake`."""
        if self._to_sleep:
            self._to_sleep = False
            await self._queue.pause(lambda: self._all("wake"), asleep=False)

    async def abort(self) -> int:
        """See :meth:`RolloutEngine.abort`."""
        return self._queue.abort()

    def stats(self) -> dict[str, float]:
        """See :meth:`RolloutEngine.stats`; sums the latest counters of all engines."""
        names = dict.fromkeys(name for replica in self._handles for name in replica.stats)
        added = {name: sum(replica.stats.get(name, 0) for replica in self._handles) for name in names}
        own = {name: self._queue.counts[name] for name in ("samples", "tokens")}
        return {**added, **own, "running": self._queue.unended}

    async def close(self) -> None:
        """Aborts the samples in flight, closes the engines and ends their actors. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.close()
        self._balance.close()
        closing = [asyncio.ensure_future(_answer(replica.actor.close.remote())) for replica in self._handles]
        _done, late = await asyncio.wait(closing, timeout=_CLOSE_S)
        for task in late:
            task.cancel()
        self._kill()
        await asyncio.gather(*closing, return_exceptions=True)

    async def _call(self, method: str, *arguments: Any) -> dict[str, Exception]:
        """Calls a method of all replicas concurrently; returns the errors by replica."""
        calls = [_answer(getattr(replica.actor, method).remote(*arguments)) for replica in self._handles]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return {
            replica.name: reason(replica.name, answer)
            for replica, answer in zip(self._handles, answers, strict=True)
            if isinstance(answer, BaseException)
        }

    async def _all(self, method: str) -> None:
        await self._balance.settled()
        for name, error in (await self._call(method)).items():
            raise RunError(f"{method}: {name}: {error}") from error

    def _kill(self) -> None:
        import ray

        if ray.is_initialized():
            for replica in self._handles:
                ray.kill(replica.actor)
        self._places.release()


def _lost(cause: Exception) -> str:
    return f"rollout: {cause}; the replicas have to be rebuilt."


async def _answer(ref: Any) -> Any:
    return await ref
