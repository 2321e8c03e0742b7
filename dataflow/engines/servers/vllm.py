"""vLLM's OpenAI server, started with ``VLLM_SERVER_DEV_MODE=1``, which offers new weights.

Samples come from ``/v1/completions`` with token ids there and back. New weights are read from a directory by the
worker's own ``reload_weights``. With this package's worker extension (``--worker-extension-cls`` :data:`EXTENSION`) and
``--logprobs-mode processed_logits`` the server reports log-probs as the trainer computes them. On a CPU it needs the
extension for tied weights, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dataflow.engines.base import Sampling
from dataflow.engines.servers.client import Client, ServerError
from dataflow.engines.servers.protocol import (
    SHAPE,
    About,
    DrawnSample,
    LogProbs,
    cached_of,
    checked,
    finish_of,
    reply_bytes,
    tokenized,
)
from dataflow.errors import ConfigError

EXTENSION = "dataflow.engines.vllm.worker.RolloutWorker"
_ABOUT_S = 60.0
"""Seconds for a description: the first one makes vLLM look at its machine."""
_RESUME_S = 10.0
"""Seconds for the end of a pause whose load has failed."""
_FAILED = 500
_MODES: dict[str, LogProbs] = {"raw_logprobs": "raw", "processed_logprobs": "processed"}


class _NotBegun(ServerError):
    """A load was refused before the worker began: it has all of the old weights."""


class VllmServer:
    """A :class:`~dataflow.engines.servers.protocol.ServerProtocol` for vLLM."""

    def __init__(self, client: Client, version: str) -> None:
        self.client = client
        self._kind = f"vLLM {version}"
        self._model = ""
        self._extended = False

    async def about(self) -> About:
        """See :meth:`ServerProtocol.about`."""
        models = await self.client.get("/v1/models", _ABOUT_S)
        try:
            info = await self.client.get("/server_info?config_format=json", _ABOUT_S)
        except ServerError as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"engine.urls: {self.client.url} cannot take weights; start it with VLLM_SERVER_DEV_MODE=1 in its "
                "environment, where nobody else can reach it."
            ) from error
        try:
            first = models["data"][0]
            self._model, root, longest = str(first["id"]), str(first.get("root") or first["id"]), first["max_model_len"]
            if type(longest) is not int:
                raise ServerError(f"GET /v1/models has max_model_len '{longest}', which is no number of tokens")
            config = info["vllm_config"]
            mode = str(config["model_config"]["logprobs_mode"])
            cpu = str(config["device_config"]["device"]).startswith("cpu")
            self._extended = config["parallel_config"].get("worker_extension_cls") == EXTENSION
        except (LookupError, TypeError, AttributeError) as error:
            raise ServerError("GET /server_info is not answered as vLLM 0.31 does") from error
        uncut = self._extended and mode == "processed_logits"
        kinds: LogProbs = "uncut" if uncut else _MODES.get(mode, "none")
        shape = await self._shape() if self._extended else {}
        return About(self._kind, self._model, root, longest, kinds, cpu, self._extended, shape)

    async def _shape(self) -> dict[str, Any]:
        reply = await self.client.post("/collective_rpc", {"method": "shape_of_model", "args": list(SHAPE)}, _ABOUT_S)
        found = reply.get("results") if isinstance(reply, dict) else None
        return found[0] if isinstance(found, list) and found and isinstance(found[0], dict) else {}

    async def tokens_of(self, text: str) -> list[int] | None:
        """See :meth:`ServerProtocol.tokens_of`."""
        return await tokenized(
            self.client, {"model": self._model, "prompt": text, "add_special_tokens": False}, _ABOUT_S
        )

    async def knows(self, token: int) -> bool:
        """See :meth:`ServerProtocol.knows`. A paused server does not say."""
        paused = await self.client.get("/is_paused", _ABOUT_S)
        if not isinstance(paused, dict):
            raise ServerError("GET /is_paused is answered without is_paused")
        if paused.get("is_paused"):
            return True
        try:
            await self.client.post(
                "/v1/completions", {"model": self._model, "prompt": [token], "max_tokens": 1}, _ABOUT_S
            )
        except ServerError as error:
            if error.refused and "out of vocabulary" in str(error):
                return False
            raise
        return True

    async def sample(self, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int], seed: int) -> DrawnSample:
        """See :meth:`ServerProtocol.sample`."""
        stops = [*ends, *sampling.stop_token_ids]
        reply = await self.client.post(
            "/v1/completions",
            {
                "model": self._model,
                "prompt": list(prompt),
                # All of them: else the server takes those of the model's generation_config.json.
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": max(0, sampling.top_k),
                "min_p": sampling.min_p,
                "repetition_penalty": sampling.repetition_penalty,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "stop_token_ids": stops,
                "seed": seed,
                "logprobs": 0,
                "return_token_ids": True,
            },
            most_bytes=reply_bytes(prompt, sampling),
        )
        try:
            (choice,) = reply["choices"]
            read = choice.get("prompt_token_ids")
            tokens, log_probs = checked(choice["token_ids"], choice["logprobs"]["token_logprobs"], sampling)
            finish = finish_of(choice["finish_reason"], tokens, stops)
            details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = cached_of(details.get("cached_tokens"))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerError("POST /v1/completions is not answered with token ids and their log-probs") from error
        if read is not None and read != list(prompt):
            raise ServerError("the server has sampled from another prompt than it was sent")
        return DrawnSample(tokens, log_probs, finish, cached, None)

    async def version(self, limit_s: float) -> str:
        """See :meth:`ServerProtocol.version`."""
        return _text(await self.client.get("/weight_info", limit_s), "weight_version", "GET /weight_info")

    async def load(self, directory: Path, version: str) -> None:
        """See :meth:`ServerProtocol.load`."""
        post, half = self.client.post, False
        try:
            # First, so that a server that fails halfway, or stays paused, does not pass for one with the old weights.
            await post("/update_weight_version", {"new_version": f"{version}, loading"})
            await post("/pause?mode=abort")
            if self._extended:
                await post("/collective_rpc", {"method": "prepare_sampler"})
            half = True
            await self._replace(directory)
            half = False
            cleared = await post("/reset_prefix_cache")
            if not (isinstance(cleared, dict) and cleared.get("success")):
                raise ServerError("the prefix cache could not be reset: requests of another client are running")
            await post("/resume")
            # Last, so that no paused server passes for one with the new weights.
            await post("/update_weight_version", {"new_version": version})
        except BaseException as error:  # also when the load is cancelled
            # Others may use it; but a sample from half of the weights can end the server.
            if not half or isinstance(error, _NotBegun):
                await asyncio.shield(asyncio.ensure_future(self._resume()))
            raise

    async def _replace(self, directory: Path) -> None:
        """Replaces all weights of the worker.

        Raises:
            _NotBegun: it has the old ones.
            ServerError: it may have half of the new ones.
        """
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        begun = False
        try:
            await self.client.post("/collective_rpc", asked)
            begun = True
            if self._extended:
                await self.client.post("/collective_rpc", {"method": "refresh_head"})
        except ServerError as error:
            if not begun and error.status is not None and error.status < _FAILED:
                raise _NotBegun(str(error), status=error.status, wait_s=error.wait_s) from error
            # 500 is an exception of its worker, and another try would have the same end. Others may pass.
            status = 400 if error.status == _FAILED else error.status
            why = f"{error}; it stays paused until it takes weights"
            raise ServerError(why, status=status, wait_s=error.wait_s) from error

    async def _resume(self) -> None:
        with suppress(ServerError):
            await self.client.post("/resume", limit_s=_RESUME_S)


def _text(reply: Any, name: str, what: str) -> str:
    if not isinstance(reply, dict) or name not in reply:
        raise ServerError(f"{what} is answered without {name}")
    return str(reply[name])
