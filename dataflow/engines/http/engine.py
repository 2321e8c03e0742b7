"""Rollout on inference servers that run elsewhere: samples over HTTP, new weights through files that both sides see.

A sample depends on its seed and the weights alone, so one that fails is drawn again, on another server if possible. It
counts only if its server has shown the label of the current weights after it: the label is new for each version, and a
restart loses it. A server that fails, or shows another label, gets no samples until it holds the current weights.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from loguru import logger

from dataflow.engines.base import Sample
from dataflow.engines.http.server import Server, ServerError, Wanted, servers_at
from dataflow.engines.least_load import LeastLoad
from dataflow.engines.rollout import Request, Rollout
from dataflow.engines.samples import seed_of
from dataflow.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    import torch

_INVALID = (400, 413, 422)
"""Statuses of a request that the server cannot read, or whose prompt is too long."""
_BACKOFF_S, _LONGEST_S = 0.5, 10.0


@dataclass(eq=False)
class _State:
    """A server as the engine sees it; ``failures`` are those in a row, and ``restoring`` is None while it is in use."""

    server: Server
    loads: int = 0
    failures: int = 0
    restoring: asyncio.Task[None] | None = None


class HttpRollout(Rollout):
    """A :class:`~dataflow.engines.base.RolloutEngine` over vLLM's OpenAI servers.

    The servers may serve anything before: with the first call they get the weights of ``model``, unless that call
    brings others. They must not be used by another run at the same time. All calls must be made on one event loop.

    Args:
        max_model_len: tokens of prompt and response together.
        slots: requests in flight at one server.
        timeout: seconds that a server may take for a sample, or to load weights.
        tries: of a sample, at all servers together; rejections for load are not counted for ``wait`` seconds.
        wait: seconds that samples may wait while no server takes them.
        weights_dir: directory that the servers can read, too; None for a temporary one.
    """

    def __init__(
        self,
        model: str,
        max_prompt_length: int,
        urls: Sequence[str],
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
        self._wanted = Wanted(model, max_model_len)
        self._states = [_State(server) for server in servers_at(urls, api_key_env, timeout)]
        self._last = "no answer"  # the last failure
        self._choice = LeastLoad(self._states, slots, wait, self._none_left)
        self._place = Path(weights_dir or tempfile.mkdtemp(prefix="dataflow-weights-")).resolve()
        _remove_weights(self._place)  # of an engine before, which was killed
        self._current: Path | None = None  # the name of the directory of the weights is their label
        self._writing: asyncio.Task[Path] | None = None

    async def _ready(self) -> None:
        """Gives the servers the weights of ``model``, unless a sync has brought others."""

        async def work() -> None:
            if self._current is None:
                await self._load(await self._shared(None, 0), 0)

        if self._current is None:
            await self._gate.alone(work)

    async def _draw(self, request: Request) -> Sample:
        """Draws a sample; each server at which it fails is out of use until it holds the current weights."""
        now = asyncio.get_running_loop().time
        began, failures = now(), 0
        while True:
            # Groups and conversations have the beginning of their seeds in common.
            state = await self._choice.take(request.seed[:2])
            try:
                sample = await self._sampled(state, request)
                state.failures = 0
                return sample
            except ServerError as error:
                if error.status in _INVALID:
                    raise DataError(
                        f"rollout: {state.server.url} refuses the prompt of group {request.group} "
                        f"({len(request.prompt)} tokens): {error}; correct what it objects to: the prompt, or a "
                        "setting of engine."
                    ) from error
                self._suspend(state, error)
                if not error.throttled or now() - began >= self._wait_s:
                    failures += 1
                if failures >= self._tries:
                    raise RunError(
                        f"rollout: sample {request.index} of group {request.group} failed at {failures} tries, the "
                        f"last at {state.server.url}: {error}; see the log of that server."
                    ) from error
            finally:
                self._choice.give_back(state)

    async def _sampled(self, state: _State, request: Request) -> Sample:
        """Draws a sample from a server, and checks that it is one of the current weights."""
        weights, version, loads = self._current, self.version, state.loads
        assert weights is not None
        ends = [*self.vocabulary.ends, *request.sampling.stop_token_ids]
        seed = seed_of(*request.seed)
        tokens, log_probs, end = await state.server.sample(request.prompt, request.sampling, ends, seed)
        if (label := await state.server.label()) != weights.name or loads != state.loads:
            raise ServerError(f"it holds weights '{label}', not '{weights.name}': it was restarted, or changed")
        if end not in ("stop", "length"):
            raise ServerError(f"the server ended the sample with '{end}'")
        known = bool(tokens) and max(tokens) < self.vocabulary.size
        if not known or len(log_probs) != len(tokens) or not all(map(math.isfinite, log_probs)):
            raise ServerError(f"the reply has {len(log_probs)} log-probs of {len(tokens)} tokens, or unknown ones")
        finish = "stop" if end == "stop" else "length"
        return Sample(request.group, request.index, tokens, log_probs, version, finish)  # type: ignore[arg-type]

    async def _shared(self, weights: Mapping[str, torch.Tensor] | None, version: int) -> Path:
        """Writes weights, those of ``model`` for None, to a directory of their own."""
        # A thread cannot be cancelled: close() waits for it.
        work = asyncio.to_thread(_write_weights, self._place, self._model, weights, version)
        self._writing = asyncio.ensure_future(work)
        return await asyncio.shield(self._writing)

    async def _load(self, weights: Path, version: int) -> None:
        """Makes all servers in use load new weights; one that is out of use gets them when it answers again.

        If no server takes them, it raises RunError, and samples are drawn with the old ones.
        """
        before, self._current = self._current, weights
        try:
            given = [state for state in self._states if state.restoring is None]
            for state in given:
                self._choice.set_open(state, False)
            errors = await asyncio.gather(*map(self._give, given))
            for state, error in zip(given, errors, strict=True):
                if isinstance(error, ConfigError) and before is None:
                    raise error
                if error is not None:
                    self._suspend(state, error)
            refusals = [error for error in errors if isinstance(error, ServerError) and error.refused]
            if len(refusals) == len(self._states):
                raise RunError(
                    f"weight sync: {given[0].server.url} does not take the weights: {refusals[0]}; it must serve the "
                    f"model of model.path, and read {self._place} (engine.weights_dir)."
                )
            self._choice.give_back(await self._choice.take(None))  # one that holds them
        except BaseException:
            self._current = before
            raise
        await asyncio.to_thread(_remove_weights, self._place, weights)

    async def _give(self, state: _State) -> ServerError | ConfigError | None:
        """Makes a server hold the current weights, whatever it is and held before; returns its failure."""
        weights, server = None, state.server
        try:
            while weights != self._current:  # a sync may come meanwhile
                weights = self._current
                assert weights is not None
                await server.check(self._wanted)
                if await server.label() != weights.name:
                    state.loads += 1
                    await server.load(weights, weights.name)
                    if (label := await server.label()) != weights.name:
                        raise ServerError(f"it says that it holds weights '{label}' after a load", status=400)
        except (ServerError, ConfigError) as error:
            return error
        self._choice.set_open(state, True)
        return None

    def _suspend(self, state: _State, error: Exception) -> None:
        """Takes a server out of use until it holds the current weights; samples in flight there go on."""
        self._last = f"{state.server.url}: {error}"
        if state.restoring is None:
            self._choice.set_open(state, False)
            wait_s = error.wait_s if isinstance(error, ServerError) else 0.0
            state.restoring = asyncio.get_running_loop().create_task(self._restore(state, wait_s))

    async def _restore(self, state: _State, wait_s: float) -> None:
        told, url = False, state.server.url
        while True:
            # Nothing says when a server elsewhere has started.
            await asyncio.sleep(wait_s or min(_BACKOFF_S * 2.0 ** min(state.failures, 10), _LONGEST_S))
            state.failures, wait_s = state.failures + 1, 0.0
            if (error := await self._give(state)) is None:
                break
            self._last = f"{url}: {error}"
            if not told:
                told = True
                logger.warning(f"rollout: server {url} gets no samples until it has the current weights: {error}")
        state.restoring = None
        if told:
            logger.info(f"rollout: server {url} is in use again, with the current weights.")

    def _lost(self, cause: Exception) -> None:
        """No error loses the engine: it is asked again when the run is resumed."""

    def _none_left(self) -> RunError:
        return RunError(
            f"rollout: none of the {len(self._states)} servers of engine.urls took a sample for {self._wait_s:g} s "
            f"(engine.server_wait), the last with {self._last}; start them, then resume the run."
        )

    async def close(self) -> None:
        """Aborts the samples in flight, closes the connections and removes the files. Idempotent."""
        self._gate.close()
        restoring = [state.restoring for state in self._states if state.restoring is not None]
        for task in restoring:
            task.cancel()
        writing = [] if self._writing is None else [self._writing]
        await asyncio.gather(*restoring, *writing, return_exceptions=True)
        for state in self._states:
            await state.server.close()
        await asyncio.to_thread(_remove_weights, self._place)


def check_servers(
    urls: Sequence[str], api_key_env: str | None, model: str | None, longest: int, patience_s: float
) -> str:
    """Waits up to ``patience_s`` until all servers answer, and checks what they serve; nothing is changed.

    Returns what they are, as a clause.
    """

    async def kind_of(server: Server) -> str:
        end, why = time.monotonic() + patience_s, ""
        while True:
            try:
                async with asyncio.timeout(end - time.monotonic()):
                    return await server.check(Wanted(model, longest))
            except (ServerError, TimeoutError) as error:
                if not why:
                    logger.warning(f"engine.urls: {server.url}: {error}; waiting for it, at most {patience_s:g} s")
                why = str(error) or why or "no reply"
            if time.monotonic() + _BACKOFF_S > end:
                raise ConfigError(
                    f"engine.urls: {server.url} does not answer within {patience_s:g} s ({why}); start it, or correct "
                    "the url."
                )
            await asyncio.sleep(_BACKOFF_S)

    async def kinds() -> list[str]:
        opened = servers_at(urls, api_key_env, patience_s)
        try:
            return await asyncio.gather(*map(kind_of, opened))
        finally:
            for server in opened:
                await server.close()

    found = asyncio.run(kinds())
    return "; ".join(f"{found.count(kind)} x {kind}" for kind in dict.fromkeys(found))


def _write_weights(place: Path, model: Path, weights: Mapping[str, torch.Tensor] | None, version: int) -> Path:
    """Writes weights, those of ``model`` for None, into a new directory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = place / f"version-{version}-{uuid.uuid4().hex[:12]}"
    try:
        target.mkdir(parents=True)
        if weights is None:
            for file in model.glob("*.safetensors*"):
                shutil.copyfile(file, target / file.name)
        else:
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
