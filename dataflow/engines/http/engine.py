"""Rollout on inference servers that run elsewhere: samples over HTTP, new weights through files that both sides see.

A sample depends on its seed and the weights alone, so one that fails is drawn again, on another server if possible. It
counts only if its server has shown the label of the current weights, in the reply or after it: the label is new for
each version, and a restart loses it. A server that fails, or shows another label, gets no samples until it holds the
current weights.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loguru import logger

from dataflow.engines.base import Sample, Sampling
from dataflow.engines.choice import refused_temperature
from dataflow.engines.http.check import clients, connect
from dataflow.engines.http.server import Client, ServerError, Wanted
from dataflow.engines.http.sglang import SglangServer
from dataflow.engines.http.vllm import VllmServer
from dataflow.engines.least_load import LeastLoad
from dataflow.engines.rollout import Request, Rollout
from dataflow.engines.samples import seed_of
from dataflow.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    import torch

_INVALID = (400, 413, 422)
"""Statuses of a request that the server cannot read, or whose prompt is too long."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
_BACKOFF_S, _LONGEST_S = 0.5, 10.0


@dataclass(eq=False)
class _Server:
    """A server as the engine sees it.

    Attributes:
        client: its HTTP client.
        protocol: that it speaks, once it was connected.
        loads: number of times that it was sent weights.
        failures: in a row.
        failure: the last one.
        restoring: brings it back into use; None while it is in use.
    """

    client: Client
    protocol: VllmServer | SglangServer | None = None
    loads: int = 0
    failures: int = 0
    failure: str = "no answer"
    restoring: asyncio.Task[None] | None = None


class HttpRollout(Rollout):
    """A :class:`~dataflow.engines.base.RolloutEngine` over inference servers: vLLM's OpenAI server, or SGLang's.

    The servers may serve anything before: with the first call they get the weights of ``model``, unless that call
    brings others. They must not be used by another run at the same time. All calls must be made on one event loop.

    Args:
        model, max_prompt_length, in_flight: see :class:`~dataflow.engines.rollout.Rollout`, as for errors.
        urls: of the servers, maybe with a user name and a password.
        sampling: of training, whose log-probs the servers must report.
        max_model_len: tokens of prompt and response together.
        api_key_env: environment variable that holds the servers' API key.
        slots: requests in flight at one server.
        timeout: seconds that a server may take for a sample, or to load weights.
        tries: of a sample, at all servers together; rejections for load are not counted.
        wait: seconds that samples may wait while no server takes them.
        weights_dir: directory that the servers can read, too; None for a temporary one.

    Raises:
        ConfigError: an address or the key is invalid.
    """

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
        tries: int = 4,
        wait: float = 300.0,
        weights_dir: str | None = None,
        in_flight: Literal["wait", "abort"] = "wait",
    ) -> None:
        super().__init__(model, max_prompt_length, "http", in_flight=in_flight)
        self._model, self._tries, self._wait_s = Path(model), tries, wait
        self._wanted = Wanted(model, self.vocabulary.tokenizer, max_model_len, sampling)
        self._servers = [_Server(client) for client in clients(urls, api_key_env, timeout)]
        self._last = self._servers[0]  # that has failed
        self._choice = LeastLoad(self._servers, slots, wait, self._none_left)
        self._place = Path(weights_dir or tempfile.mkdtemp(prefix="dataflow-weights-")).resolve()
        _remove_weights(self._place)  # of an engine before, which was killed
        self._current: Path | None = None  # the name of the directory of the weights is their label
        self._writing: asyncio.Future[Path] | None = None  # of the thread
        self._written: asyncio.Future[Path] | None = None  # of the sync that waits for it

    # --- samples ------------------------------------------------------------------------------------------------

    def _check(self, sampling: Sampling) -> None:
        super()._check(sampling)
        if why := refused_temperature(sampling.temperature, "http"):
            raise ConfigError(f"rollout: temperature={sampling.temperature}; {why}.")

    async def _ready(self) -> None:
        """Gives the servers the weights of ``model``, unless a sync has brought others."""

        async def work() -> None:
            if self._current is None:
                await self._load(await self._shared(None, 0), 0)

        if self._current is None:
            await self._gate.alone(work)

    async def _draw(self, request: Request) -> Sample:
        """Draws a sample, on other servers if it fails."""
        failed: list[_Server] = []
        rejected_s: float | None = None
        while True:
            # Groups and conversations have the beginning of their seeds in common.
            server = await self._choice.take(request.seed[:2], failed)
            try:
                sample = await self._sampled(server, request)
            except ServerError as error:
                if error.status in _INVALID:
                    raise DataError(
                        f"rollout: {server.client.url} refuses the prompt of group {request.group} "
                        f"({len(request.prompt)} tokens): {error}; correct what it objects to: the prompt, or a "
                        "setting of engine."
                    ) from error
                self._suspend(server, error, error.wait_s)
                now = asyncio.get_running_loop().time()
                rejected_s = (now if rejected_s is None else rejected_s) if error.throttled else None
                if rejected_s is None or now - rejected_s >= self._wait_s:
                    failed.append(server)
                if len(failed) >= self._tries:
                    raise RunError(
                        f"rollout: sample {request.index} of group {request.group} failed at {len(failed)} tries, the "
                        f"last at {server.client.url}: {error}; see the log of that server."
                    ) from error
            else:
                server.failures = 0
                return sample
            finally:
                self._choice.give_back(server)

    async def _sampled(self, server: _Server, request: Request) -> Sample:
        """Draws a sample from a server, and checks that it is one of the current weights."""
        weights, version, loads, protocol = self._current, self.version, server.loads, server.protocol
        assert weights is not None
        assert protocol is not None
        ends = [*self.vocabulary.ends, *request.sampling.stop_token_ids]
        tokens, log_probs, end = await protocol.sample(request.prompt, request.sampling, ends, seed_of(*request.seed))
        if (label := await protocol.label()) != weights.name or loads != server.loads:
            raise ServerError(f"it holds weights '{label}', not '{weights.name}': it was restarted, or changed")
        if end not in ("stop", "length"):
            raise ServerError(f"the server ended the sample with '{end}'")
        known = bool(tokens) and max(tokens) < self.vocabulary.size
        if not known or len(log_probs) != len(tokens) or not all(map(math.isfinite, log_probs)):
            raise ServerError(f"the reply has {len(log_probs)} log-probs of {len(tokens)} tokens, or unknown ones")
        # SGLang says "length" of a token that ends the response and is the last one allowed, too.
        finish: Literal["stop", "length"] = "stop" if end == "stop" or tokens[-1] in ends else "length"
        return Sample(request.group, request.index, tokens, log_probs, version, finish=finish)

    # --- weights ------------------------------------------------------------------------------------------------

    async def _shared(self, weights: Mapping[str, torch.Tensor] | None, version: int) -> Path:
        """Writes weights, those of ``model`` for None, to a directory of their own."""
        # A thread cannot be cancelled: close() waits for it.
        work = asyncio.to_thread(_write_weights, self._place, self._model, weights, version)
        self._writing = asyncio.ensure_future(work)
        self._written = asyncio.shield(self._writing)
        return await self._written

    async def _load(self, weights: Path, version: int) -> None:
        """Makes all servers in use load new weights. One that is out of use gets them when it answers again.

        Raises:
            RunError: no server takes them, or none answers; samples are drawn with the old ones.
        """
        before, self._current = self._current, weights
        try:
            given = [server for server in self._servers if server.restoring is None]
            with self._choice.held(given):
                errors = await asyncio.gather(*map(self._given, given))
            for server, error in zip(given, errors, strict=True):
                if isinstance(error, ConfigError) and before is None:
                    raise error
                if error is not None:
                    self._suspend(server, error)
            refusals = [error for error in errors if isinstance(error, ServerError) and error.refused]
            if len(refusals) == len(self._servers):
                raise RunError(
                    f"weight sync: {given[0].client.url} does not take the weights: {refusals[0]}; it must serve the "
                    f"model of model.path, and read {self._place} (engine.weights_dir)."
                )
            self._choice.give_back(await self._choice.take(None))  # one that holds them
        except BaseException:
            self._current = before
            raise
        await asyncio.to_thread(_remove_weights, self._place, weights)

    async def _given(self, server: _Server) -> ServerError | ConfigError | None:
        """Makes a server hold the current weights, whatever it is and held before; returns its failure."""
        weights = None
        try:
            while weights != self._current:  # a sync may come meanwhile
                weights = self._current
                assert weights is not None
                protocol = await connect(server.client)
                await protocol.check(self._wanted)
                if await protocol.label() != weights.name:
                    server.loads += 1
                    await protocol.load(weights, weights.name)
                    if (label := await protocol.label()) != weights.name:
                        raise ServerError(f"it says that it holds weights '{label}' after a load", status=400)
                server.protocol = protocol
        except (ServerError, ConfigError) as error:
            return error
        self._choice.set_open(server, True)
        return None

    # --- servers that fail --------------------------------------------------------------------------------------

    def _suspend(self, server: _Server, error: Exception, wait_s: float = 0.0) -> None:
        """Takes a server out of use until it holds the current weights; samples in flight there go on."""
        server.failure, self._last = str(error), server
        if server.restoring is None:
            self._choice.set_open(server, False)
            server.restoring = asyncio.get_running_loop().create_task(self._restore(server, wait_s))

    async def _restore(self, server: _Server, wait_s: float) -> None:
        told = False
        while True:
            await asyncio.sleep(wait_s or min(_BACKOFF_S * 2.0 ** min(server.failures, 10), _LONGEST_S))
            server.failures, wait_s = server.failures + 1, 0.0
            if (error := await self._given(server)) is None:
                break
            server.failure, self._last = str(error), server
            if not told:
                told = True
                logger.warning(
                    f"rollout: server {server.client.url} gets no samples until it has the current weights: {error}"
                )
        server.restoring = None
        if told:
            logger.info(f"rollout: server {server.client.url} is in use again, with the current weights.")

    def _lost(self, cause: Exception) -> None:
        """No error loses the engine: it is asked again when the run is resumed."""

    def _none_left(self) -> RunError:
        return RunError(
            f"rollout: none of the {len(self._servers)} servers of engine.urls took a sample for {self._wait_s:g} s "
            f"(engine.server_wait), the last with {self._last.client.url}: {self._last.failure}; start them, then "
            "resume the run."
        )

    async def sleep(self) -> None:
        """See :meth:`RolloutEngine.sleep`: the servers have memory of their own."""

    async def close(self) -> None:
        """Aborts the samples in flight, closes the connections and removes the files. Idempotent."""
        if self._written is not None:
            self._written.cancel()
        await self._gate.closed()
        restoring = [server.restoring for server in self._servers if server.restoring is not None]
        for task in restoring:
            task.cancel()
        writing = [] if self._writing is None else [self._writing]
        await asyncio.gather(*restoring, *writing, return_exceptions=True)
        for server in self._servers:
            await server.client.close()
        await asyncio.to_thread(_remove_weights, self._place)


def _write_weights(place: Path, model: Path, weights: Mapping[str, torch.Tensor] | None, version: int) -> Path:
    """Writes weights, those of ``model`` for None, with its configuration and tokenizer, into a new directory.

    Raises:
        RunError: they cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = place / f"version-{version}-{uuid.uuid4().hex[:12]}"
    try:
        target.mkdir(parents=True)
        for file in model.iterdir():
            if file.is_file() and (weights is None or not file.name.endswith(_WEIGHTS)):
                shutil.copyfile(file, target / file.name)
        if weights is not None:
            contiguous = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
            save_file(contiguous, target / "model.safetensors", {"format": "pt"})
    except (OSError, SafetensorError) as error:
        shutil.rmtree(target, ignore_errors=True)
        raise RunError(
            f"weight sync: the weights cannot be written to {target} ({error}); make room, or give engine.weights_dir "
            "another directory that the servers can read."
        ) from error
    return target


def _remove_weights(place: Path, but: Path | None = None) -> None:
    """Removes all weights that engines have written to a place but one directory, and the place if it is empty then."""
    for each in place.glob("version-*"):
        if each != but:
            shutil.rmtree(each, ignore_errors=True)
    with suppress(OSError):  # it is not empty, or was never made
        place.rmdir()
