"""SGLang's server: samples from ``/generate``, new weights through ``/update_weights_from_disk``.

It reports log-probs at the sampling temperature, before the cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dataflow.engines.base import Sampling
from dataflow.engines.http.server import Client, Wanted, check_model, reading

PAGE = "/model_info"


class SglangServer:
    """The requests of one server, as those of :class:`~dataflow.engines.http.vllm.VllmServer`."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def check(self, wanted: Wanted) -> str:
        """Checks that the server can serve a run; returns what it is."""
        about, models = await self.client.get(PAGE), await self.client.get("/v1/models")
        with reading("GET /v1/models"):
            root, longest = about["model_path"], int(models["data"][0]["max_model_len"])
        await check_model(self.client, wanted, longest, root, {}, {})
        return "SGLang"

    async def sample(
        self, prompt: Sequence[int], sampling: Sampling, ends: Sequence[int], seed: int
    ) -> tuple[list[int], list[float], str]:
        """Samples one response."""
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
                    "stop_token_ids": list(ends),
                    "skip_special_tokens": False,
                    # Without --enable-deterministic-inference SGLang ignores it.
                    "sampling_seed": seed % 2**31,
                },
            },
        )
        with reading("POST /generate"):
            facts = reply["meta_info"]
            pairs = facts["output_token_logprobs"]
            log_probs = [float(pair[0]) for pair in pairs]
            return [pair[1] for pair in pairs], log_probs, facts["finish_reason"]["type"]

    async def label(self) -> str:
        """Returns the label of the weights that the server holds, which a restart loses."""
        reply = await self.client.get(PAGE)
        with reading(f"GET {PAGE}"):
            return str(reply["weight_version"])

    async def load(self, directory: Path, label: str) -> None:
        """Makes the server load all weights of a directory, and hold their label once it has."""
        options = {"weight_version": label, "flush_cache": True, "abort_all_requests": True}
        await self.client.post("/update_weights_from_disk", {"model_path": str(directory), **options})
