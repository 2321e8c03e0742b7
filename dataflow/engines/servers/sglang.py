"""SGLang's server: samples from ``/generate``, new weights through ``/update_weights_from_disk``.

It reports log-probs at the sampling temperature, before the cuts. Each reply has the version of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.engines.base import Sampling
from dataflow.engines.servers.client import Client, ServerError
from dataflow.engines.servers.protocol import About, DrawnSample, cached_of, checked, finish_of, reply_bytes, tokenized

_ABOUT_S = 30.0
INFO = ("/model_info", "/get_model_info")
"""Pages about the model, the older one last."""


class SglangServer:
    """A :class:`~dataflow.engines.servers.protocol.ServerProtocol` for SGLang.

    Args:
        client: of the server.
        page: about its model, one of :data:`INFO`.
    """

    def __init__(self, client: Client, page: str) -> None:
        self.client = client
        self._page = page

    async def about(self) -> About:
        """See :meth:`ServerProtocol.about`."""
        info = await self._info(_ABOUT_S)
        longest: int | None = None
        kind = "SGLang"
        try:
            server = await self.client.get("/server_info", _ABOUT_S)
        except ServerError as error:
            if error.status != 404:
                raise
            server = await self.client.get("/get_server_info", _ABOUT_S)
        if isinstance(server, dict):
            length = server.get("context_length")
            longest = length if type(length) is int else None
            kind = f"SGLang {server.get('version', '')}".rstrip()
        return About(kind, str(info["model_path"]), str(info["model_path"]), longest)

    async def tokens_of(self, text: str) -> list[int] | None:
        """See :meth:`ServerProtocol.tokens_of`."""
        return await tokenized(self.client, {"prompt": text, "add_special_tokens": False}, _ABOUT_S)

    async def knows(self, token: int) -> bool:
        """See :meth:`ServerProtocol.knows`: SGLang does not say."""
        return True

    async def sample(self, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int], seed: int) -> DrawnSample:
        """See :meth:`ServerProtocol.sample`."""
        stops = [*ends, *sampling.stop_token_ids]
        reply = await self.client.post(
            "/generate",
            {
                "input_ids": list(prompt),
                "return_logprob": True,
                "sampling_params": {
                    "max_new_tokens": sampling.max_tokens,
                    "temperature": sampling.temperature,
                    "top_p": sampling.top_p,
                    "top_k": sampling.top_k if sampling.top_k > 0 else -1,
                    "min_p": sampling.min_p,
                    "repetition_penalty": sampling.repetition_penalty,
                    "stop_token_ids": stops,
                    "skip_special_tokens": False,
                    # Without --enable-deterministic-inference SGLang ignores it.
                    "sampling_seed": seed % 2**31,
                },
            },
            most_bytes=reply_bytes(prompt, sampling),
        )
        try:
            facts = reply["meta_info"]
            pairs = facts["output_token_logprobs"]
            tokens, log_probs = checked([pair[1] for pair in pairs], [pair[0] for pair in pairs], sampling)
            finish = finish_of(facts["finish_reason"]["type"], tokens, stops)
            number, version = facts.get("completion_tokens"), facts.get("weight_version")
            cached = cached_of(facts.get("cached_tokens"))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ServerError("POST /generate is not answered with token ids and their log-probs") from error
        if number is not None and number != len(tokens):
            raise ServerError(f"the reply has {number} tokens and log-probs of {len(tokens)}")
        return DrawnSample(tokens, log_probs, finish, cached, None if version is None else str(version))

    async def version(self, limit_s: float) -> str:
        """See :meth:`ServerProtocol.version`."""
        return str((await self._info(limit_s)).get("weight_version"))

    async def load(self, directory: Path, version: str) -> None:
        """See :meth:`ServerProtocol.load`."""
        reply = await self.client.post(
            "/update_weights_from_disk",
            {
                "model_path": str(directory),
                "weight_version": version,
                "flush_cache": True,
                "abort_all_requests": True,
            },
        )
        if not isinstance(reply, dict) or not reply.get("success"):
            message = reply.get("message") if isinstance(reply, dict) else None
            raise ServerError(f"POST /update_weights_from_disk failed: {message or 'without a message'}", status=400)

    async def _info(self, limit_s: float) -> Mapping[str, Any]:
        info = await self.client.get(self._page, limit_s)
        if not isinstance(info, dict) or "model_path" not in info:
            raise ServerError(f"GET {self._page} is answered without model_path")
        return info
