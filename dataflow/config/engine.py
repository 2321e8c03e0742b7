"""The configuration of the rollout: how responses are sampled, and by which engine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from dataflow.config.section import Fraction, Section, Text, Texts
from dataflow.errors import ConfigError


class EngineConfig(Section):
    """Rollout: how responses are sampled."""

    rollout: Literal["auto", "hf", "vllm", "http"] = "auto"
    """Rollout engine: hf (transformers), vllm, auto (vLLM if it is installed for this device and faster on it), or
    http: inference servers that run elsewhere."""
    urls: Texts = Field(default=[])
    """Addresses of vLLM's OpenAI servers, http://host:port (http)."""
    api_key_env: Text | None = None
    """Environment variable that holds the API key of these servers (http)."""
    request_timeout: PositiveFloat = 600.0
    """Seconds that a server may take for a sample, or to load weights (http)."""
    request_tries: PositiveInt = 4
    """Tries of a sample, at all servers together; rejections for load are not counted (http)."""
    server_wait: PositiveFloat = 300.0
    """Seconds that the run waits while a server does not answer at its start, or later none of them (http)."""
    weights_dir: Text | None = None
    """Directory for new weights that the run and the servers can read; null for runs/NAME/weights (http)."""
    n: PositiveInt = 8
    """Responses per prompt."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Fraction = 1.0
    """Nucleus mass kept; 1 keeps all."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Most likely tokens kept; -1 or 0 keeps all."""
    max_tokens: PositiveInt = 24
    """Longest response in tokens, eos included."""
    stop: Texts = Field(default=[])
    """Tokens that end a response besides the model's own, as the tokenizer writes them."""
    replicas: Annotated[int, Field(gt=0, le=65536)] = 1
    """Engines that share a step's prompts, each in a process of its own."""
    tensor_parallel: PositiveInt = 1
    """GPUs that one engine's model is split over (vllm)."""
    max_num_seqs: PositiveInt = 256
    """Samples that are decoded at once (vllm), or requests in flight at one server (http)."""
    kv_cache_gb: PositiveFloat | None = None
    """Memory for the KV cache (vllm); null: 0.25 on a CPU, on a GPU what engine.gpu_memory leaves."""
    gpu_memory: Fraction | None = None
    """Share of the GPU's memory that weights and KV cache may take (vllm); null: 0.6 of a GPU that the trainer shares,
    0.9 of the engine's own."""
    in_flight: Literal["wait", "abort"] = "wait"
    """What a weight sync does with samples in flight: wait, or restart them with the new weights (vllm, http)."""
    restarts: NonNegativeInt = 2
    """How often the engine may be rebuilt after its process died; lost samples are then repeated."""

    @model_validator(mode="after")
    def _servers_have_addresses(self) -> EngineConfig:
        from dataflow.engines.http.server import check_urls

        if self.rollout == "http":
            check_urls(self.urls)
        elif self.urls:
            raise ConfigError("engine.urls has no effect without engine.rollout=http; leave it out.")
        return self
