"""Rollout on inference servers that run elsewhere: samples over HTTP, new weights through files that both sides see."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.engines.choice import refused_temperature
from dataflow.engines.samples import check_sampling, check_tokens, check_turn, prompt_ids, to_batch
from dataflow.engines.servers.connect import Wanted, clients
from dataflow.engines.servers.pool import Pool
from dataflow.engines.servers.weights_files import WeightsFiles, initial_weights, name_of
from dataflow.engines.servers.weights_remover import WeightsRemover
from dataflow.engines.sync_queue import Job, SampleQueue, SamplingCall, jobs_of
from dataflow.engines.vocabulary import loading, read_vocabulary
from dataflow.engines.weights import WeightNames
from dataflow.errors import Aborted, ConfigError, RunError

if TYPE_CHECKING:
    import torch


class ServerRollout:
    """A :class:`~dataflow.engines.base.RolloutEngine` over inference servers: vLLM's OpenAI server, or SGLang's.

    The servers may serve anything before: with the first call they get the weights of ``model``, unless that call
    brings others. They must not be used by another run at the same time. All calls must be made on one event loop.

    Args:
        model: directory of the actor, which the servers were started with.
        max_prompt_length: P, tokens that a prompt may have.
        urls: of the servers, maybe with a user name and a password.
        sampling: of training, whose log-probs the servers must report.
        max_model_len: tokens of prompt and response together.
        api_key_env: environment variable that holds the servers' API key.
        slots: requests in flight at one server.
        timeout: seconds that a server may take for a sample, or to load weights.
        wait: seconds that samples may wait while no server takes them.
        weights_dir: directory of this engine alone that the servers can read, too; None for a temporary one.
        in_flight: what a sync does with samples in flight: ``wait`` lets them finish, ``abort`` draws them again.

    Raises:
        ConfigError: an address or the key is invalid, ``weights_dir`` holds other files, or the model takes images.
        ModelError: the model's tokenizer or configuration cannot be read.
    """

    version: int

    def __init__(
        self,
        model: str,
        max_prompt_length: int,
        urls: Sequence[str],
        sampling: Sampling,
        max_model_len: int,
        api_key_env: str | None = None,
        slots: int = 256,
        timeout: float = 600.0,
        wait: float = 300.0,
        weights_dir: str | None = None,
        in_flight: Literal["wait", "abort"] = "wait",
    ) -> None:
        self.vocabulary, config = read_vocabulary(model)
        check_turn(hasattr(config, "vision_config"))
        with loading(model):
            self._names = WeightNames.of_config(config)
        self.version = 0
        self._model, self._longest = model, max_prompt_length
        self._redraw = in_flight == "abort"
        wanted = Wanted(model, self.vocabulary, max_model_len, sampling)
        self._queue = SampleQueue(_lost)
        self._pool = self._queue.backend = Pool(clients(urls, api_key_env, timeout), wanted, self._queue, slots, wait)
        # A label that no other run gives, and no earlier engine of this one.
        self._run = uuid.uuid4().hex[:12]
        directory = Path(weights_dir or tempfile.mkdtemp(prefix="dataflow-weights-"))
        self._files = WeightsFiles(directory, Path(model), self._run)
        self._remover = WeightsRemover(directory.resolve(), self._run)
        self._loaded = self._closed = False
        self._writing: asyncio.Future[Path] | None = None
        self._syncing = asyncio.Lock()

    async def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> AsyncIterator[Sample]:
        """See :meth:`RolloutEngine.generate`. Closing the generator early aborts the samples in flight."""
        ids = self._checked(prompts, sampling)
        await self._begin()
        jobs = jobs_of(prompts.ids, ids, sampling, seed)
        async with contextlib.aclosing(self._queue.draw(jobs)) as samples:
            async for sample in samples:
                yield sample

    async def sample(self, prompt: Sequence[int], sampling: Sampling, seed: Sequence[int]) -> Sample:
        """See :meth:`RolloutEngine.sample`."""
        (ids,) = self._checked(Batch([0], {"prompt_ids": [prompt]}), sampling)
        await self._begin()
        return await self._queue.draw_one(Job(0, 0, ids, SamplingCall(sampling, tuple(seed)), asyncio.Queue()))

    def _checked(self, prompts: Batch, sampling: Sampling) -> list[list[int]]:
        """Returns the token ids of each prompt."""
        check_sampling(sampling, self.vocabulary.size)
        if why := refused_temperature(sampling.temperature, "server"):
            raise ConfigError(f"rollout: temperature={sampling.temperature}; {why}.")
        ids = prompt_ids(prompts, self._longest)
        check_tokens(prompts, ids, self.vocabulary.size)
        return ids

    def batch(self, prompts: Batch, samples: Sequence[Sample], length: int) -> Batch:
        """See :meth:`RolloutEngine.batch`."""
        return to_batch(prompts, samples, length, self.vocabulary.tokenizer, self.vocabulary.pad)

    async def _begin(self) -> None:
        """Gives the servers the weights of the model, unless they have got others."""
        if self._loaded:
            return
        async with self._syncing:
            if not self._loaded:
                weights = await asyncio.to_thread(initial_weights, self._model)
                await self._push(self._names.pick(weights, self.version), self.version)

    async def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Makes all servers load new weights, by Hugging Face name; a tied ``lm_head.weight`` may be left out.

        A server that is out of use gets them when it answers again.

        Raises:
            DataflowError: a name is unknown or missing, a shape differs, or two tied weights differ.
            RunError: the weights cannot be written, no server takes them, or none answers.
        """
        picked = self._names.pick(weights, version)
        async with self._syncing:
            await self._push(picked, version)

    async def _push(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        directory = await self._written(weights, name_of(version))
        failed: list[Exception] = []

        async def work() -> None:
            await self._pool.settled()
            try:
                await self._pool.sync(directory, f"{self._run}:{directory.name}")
            except (RunError, ConfigError) as error:  # which the caller gets; the engine is not lost
                failed.append(error)
            else:
                self.version = self._queue.version = version
                self._loaded = True

        await self._queue.pause(work, redraw=self._redraw)
        if failed:
            raise failed[0]
        await asyncio.to_thread(self._files.keep, directory)

    async def _written(self, weights: Mapping[str, torch.Tensor], name: str) -> Path:
        """Writes weights; a thread cannot be cancelled, so the next write and the end wait for it."""
        await self._write_ended()
        if self._closed:
            raise Aborted("rollout: the engine was closed.")
        self._writing = asyncio.ensure_future(asyncio.to_thread(self._files.write, weights, name))
        return await asyncio.shield(self._writing)

    async def _write_ended(self) -> None:
        if self._writing is not None:
            await asyncio.gather(asyncio.shield(self._writing), return_exceptions=True)

    async def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`: the servers have memory of their own."""

    async def wake(self) -> None:
        """See :meth:`RolloutEngine.wake`."""

    async def abort(self) -> int:
        """See :meth:`RolloutEngine.abort`."""
        return self._queue.abort()

    def stats(self) -> dict[str, float]:
        """See :meth:`RolloutEngine.stats`; adds the servers in use, and the lost and throttled requests so far."""
        return {**self._queue.counts, "running": self._queue.unended, "servers": self._pool.up, **self._pool.counts}

    async def close(self) -> None:
        """Aborts the samples in flight, closes the connections and removes the files. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.close()
        await self._pool.close()
        await self._write_ended()
        await asyncio.to_thread(self._remover.close)


def _lost(cause: Exception) -> str:
    first_line = (str(cause).splitlines() or [""])[0]
    return f"rollout: the client of the servers failed ({type(cause).__name__}: {first_line}); it has to be rebuilt."
