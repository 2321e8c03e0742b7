"""vLLM's OpenAI server, started with ``VLLM_SERVER_DEV_MODE=1``, which offers new weights.

Samples come from ``/v1/completions`` with token ids there and back. New weights are read from a directory by the
worker's own ``reload_weights``. With this package's worker extension (``--worker-extension-cls`` :data:`EXTENSION`) and
``--logprobs-mode processed_logits`` the server reports log-probs as the trainer computes them. On a CPU it needs the
extension for tied weights, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataflow.engines.base import Sampling
from dataflow.engines.http.server import SHAPE, Client, ServerError, Wanted, check_model, reading
from dataflow.errors import ConfigError

EXTENSION = "dataflow.engines.vllm.worker.RolloutWorker"
_UNCUT = f"--worker-extension-cls {EXTENSION} --logprobs-mode processed_logits"
_INFO_S = 60.0
"""Seconds for its description, for which vLLM looks at its machine."""


class VllmServer:
    """The requests of one server; each raises ServerError if it is not answered as it should."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._model = ""
        self._extended = False

    async def check(self, wanted: Wanted) -> str:
        """Checks that the server can serve a run; returns what it is. Raises ConfigError if it cannot."""
        client, where = self.client, f"engine.urls: {self.client.url}"
        version, models = await client.get("/version"), await client.get("/v1/models")
        try:
            info = await client.get("/server_info?config_format=json", _INFO_S)
        except ServerError as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"{where} cannot take weights; start it with VLLM_SERVER_DEV_MODE=1 in its environment, where nobody "
                "else can reach it."
            ) from error
        with reading("GET /server_info"):
            (first, *_), config = models["data"], info["vllm_config"]
            self._model, longest = first["id"], int(first["max_model_len"])
            mode, cpu = config["model_config"]["logprobs_mode"], config["device_config"]["device"].startswith("cpu")
            self._extended = config["parallel_config"].get("worker_extension_cls") == EXTENSION
        if cpu and not self._extended:
            raise ConfigError(
                f"{where} computes on a CPU, where vLLM's own reload keeps a part of the old weights; start it with "
                f"{_UNCUT}."
            )
        self._check_log_probs(mode, wanted.sampling, where)
        shape: dict[str, Any] = {}
        if self._extended:
            found = await client.post("/collective_rpc", {"method": "shape_of_model", "args": list(SHAPE)})
            with reading("POST /collective_rpc"):
                shape = found["results"][0]
        root = first.get("root") or self._model
        await check_model(client, wanted, longest, root, {"model": self._model}, shape)
        return f"vLLM {version['version']}"

    def _check_log_probs(self, mode: str, sampling: Sampling, where: str) -> None:
        cuts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
        plain = sampling.temperature in (0, 1) and sampling.repetition_penalty == 1
        fits = {
            "processed_logits": self._extended,  # at the temperature, before the cuts
            "processed_logprobs": not cuts,  # after them
            "raw_logprobs": plain,  # at temperature 1, without penalties
        }
        if not fits.get(mode, False):
            choices = [*([] if cuts else ["--logprobs-mode processed_logprobs"]), _UNCUT]
            raise ConfigError(
                f"{where} does not report the log-probs of what these settings sample (temperature, top_p, top_k, "
                f"min_p, repetition_penalty); start it with {' or '.join(choices)}."
            )

    async def sample(
        self, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int], seed: int
    ) -> tuple[list[int], list[float], str]:
        """Samples one response.

        Args:
            prompt: token ids.
            sampling: how to draw.
            ends: all tokens that end a response.
            seed: of its random numbers, below 2**63.

        Returns:
            The token ids, the log-prob of each, and why the response ended.
        """
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
                "stop_token_ids": list(ends),
                "seed": seed,
                "logprobs": 0,
                "return_token_ids": True,
            },
        )
        with reading("POST /v1/completions"):
            (choice,) = reply["choices"]
            log_probs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
            return list(choice["token_ids"]), log_probs, choice["finish_reason"]

    async def label(self) -> str:
        """Returns the label of the weights that the server holds, which a restart loses."""
        reply = await self.client.get("/weight_info")
        with reading("GET /weight_info"):
            return str(reply["weight_version"])

    async def load(self, directory: Path, label: str) -> None:
        """Makes the server load all weights of a directory, and hold their label once it has.

        If it fails, the server stays paused until it takes weights: a sample from half of them could end vLLM.
        """
        # First, so that a server that fails on the way does not pass for one with the old weights.
        await self.client.post("/update_weight_version", {"new_version": f"{label}, loading"})
        await self.client.post("/pause?mode=abort")  # mode=keep would go on with requests in flight from the new ones
        if self._extended:
            await self.client.post("/collective_rpc", {"method": "prepare_sampler"})
        try:
            asked = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            await self.client.post("/collective_rpc", asked)
        except ServerError as error:
            # 500 is an exception of its worker, and another try would have the same end. Others may pass.
            raise ServerError(str(error), status=400 if error.status == 500 else error.status) from error
        if self._extended:
            await self.client.post("/collective_rpc", {"method": "refresh_head"})
        await self.client.post("/reset_prefix_cache")
        await self.client.post("/resume")
        # Last, so that no paused server passes for one with the new weights.
        await self.client.post("/update_weight_version", {"new_version": label})
