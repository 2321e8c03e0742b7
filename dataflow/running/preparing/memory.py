"""Memory that a run needs, estimated from the sizes of its models: per GPU, and of its checkpoints on disk.

docs/dry_runs.md has the formula: a trained model has weights and the optimizer's state, sharded over the ranks, and
while it computes gradients, the largest layers whole, activations and logits. vLLM takes its share of a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.config.training import TrainedConfig
from dataflow.models.size import Size, size_of
from dataflow.running.preparing.machine import GIB, gib
from dataflow.running.services.hosting import CRITIC, REPLICAS, SERVERS, TRAINER, VLLM
from dataflow.stage import Hosted

_IDLE = 1.0 * GIB
"""Of each process on a GPU: its CUDA context, and what its libraries allocate."""
_ENGINE_WORK = 2.0 * GIB
"""vLLM's activations and CUDA graphs, about."""
_TEACHER = "dataflow.engines.verl.trainer:VerlTeacher"
_WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""


@dataclass(frozen=True)
class Part:
    """What a service takes of each of its GPUs, in bytes.

    ``held`` is taken all the time, or by an engine that ``sleeps`` while others compute, while it is awake; ``works``
    is what it takes more while it computes. ``share`` of the GPU's memory is taken whatever the model; 0 for what the
    model needs.
    """

    name: str
    held: float
    works: float = 0.0
    sleeps: bool = False
    share: float = 0.0

    def holds(self, total: float) -> float:
        """Returns the bytes that it holds on a GPU of that many."""
        return max(self.held, self.share * total)

    def shown(self, total: float) -> str:
        """Returns what it takes of a GPU of that many bytes, as a clause."""
        computing = f", computing {gib(self.holds(total) + self.works)}" if self.works else ""
        return f"{self.name} {gib(self.holds(total))}{computing}"


@dataclass(frozen=True)
class Need:
    """What a run needs: the services on each GPU of a pool, by the pool's name, and space on the disk.

    ``checkpoint`` is the bytes of one checkpoint, ``model`` those of the exported model, at most.
    """

    pools: Mapping[str, Sequence[Part]]
    checkpoint: float
    model: float


def need_of(config: Any, hosts: Mapping[str, Hosted]) -> Need:
    """Returns what a run needs.

    ``config`` is a :class:`~dataflow.config.run.RunConfig` whose models are directories. NotChecked means that a
    model's size cannot be told from its configuration.
    """
    pools: dict[str, list[Part]] = {}
    checkpoint = model = 0.0
    for name, host in hosts.items():
        if host.factory not in (TRAINER, CRITIC, _TEACHER) and (name != "rollout" or host.factory == SERVERS):
            continue
        size = size_of(host.options.get("model") or config.model.path)
        if host.factory == _TEACHER:
            part, pool = Part("teacher", 4.0 * size.parameters / host.ranks + _IDLE, _gathered(size, 2)), "teacher GPU"
        elif name == "rollout":
            part, pool = _engine(config, host, size), "rollout GPU"
        else:
            own = host.options["trainer" if host.factory == TRAINER else "critic"]
            part, pool = _trained(config, host, own, size), "training GPU"
            if config.checkpoint.every:  # without the weights that are frozen
                checkpoint += trained_of(own, size) * (_WIDTHS[own.model_dtype] + state_of(own))
            if host.factory == TRAINER and config.checkpoint.export:
                model = 4.0 * size.parameters
        shared = config.placement == "colocated" and pool != "teacher GPU"
        pools.setdefault("GPU" if shared else pool, []).append(part)
    return Need(pools, checkpoint, model)


def peak(parts: Sequence[Part], total: float) -> float:
    """Returns the most bytes that services take of a GPU of ``total`` bytes, one of them computing at a time."""
    awake = sum(each.holds(total) for each in parts if not each.sleeps)
    return max(awake + part.works + (part.holds(total) if part.sleeps else 0) for part in parts)


def _engine(config: Any, host: Hosted, size: Size) -> Part:
    factory, options = host.factory, host.options
    if factory == REPLICAS:
        factory, options = options["factory"], options["options"]
    if factory != VLLM:  # transformers, in float32, with a cache of all samples
        rows = config.data.prompts * config.engine.n
        tokens = rows * (config.data.max_prompt_length + config.response_length)
        return Part("rollout", 4.0 * size.parameters + _IDLE, 4.0 * size.cached * tokens)
    held = 2 * size.parameters / config.engine.tensor_parallel + _ENGINE_WORK
    given, sleeps = options.get("kv_cache_bytes"), config.placement == "colocated"
    return Part("rollout", held + (given or 0), sleeps=sleeps, share=0.0 if given else options["gpu_memory"])


def trained_of(options: TrainedConfig, size: Size) -> float:
    """Returns the number of weights that have a gradient: all, or at most those of an adapter."""
    if options.lora.rank is None:
        return float(size.parameters)
    # Beside queries, keys, values and output, and the three layers of the feed-forward part.
    widths = 8 * size.hidden + 3 * (size.hidden + size.intermediate)
    return float(options.lora.rank * size.layers * widths)


def state_of(options: TrainedConfig) -> float:
    """Returns the bytes that the optimizer keeps for a weight; those of a kind that is not known are AdamW's."""
    name = options.optimizer.lower()
    if "8bit" in name:
        return 2.0
    values = 2
    if name == "sgd":
        values = 1 if options.optimizer_kwargs.get("momentum") else 0
    return float(values * _WIDTHS[options.model_dtype])


def _trained(config: Any, host: Hosted, own: TrainedConfig, size: Size) -> Part:
    actor = host.factory == TRAINER
    # A rank has at most its rows of a mini-batch in one pass.
    rows = max(1, config.data.prompts // config.trainer.mini_batches * config.engine.n // host.ranks)
    longest = config.data.max_prompt_length + config.response_length
    tokens = getattr(own, "max_tokens_per_gpu", None) or longest * min(own.micro_batch_size, rows)
    width = 4 if own.dtype == "float32" else 2
    layer = 10 * size.hidden + 4 * size.intermediate
    # A layer that is computed again for its gradient keeps its input; one that is not, about ten activations of its
    # width and four of its feed-forward part. Of those that are moved to CPU memory, two layers' are on the GPU.
    again = own.gradient_checkpointing is not False
    layers = min(2, size.layers) if own.activation_offload else size.layers
    kept = width * tokens * (size.hidden * layers + layer if again else layer * layers)
    logits = (2 * width + 4) * tokens * size.vocabulary if actor else 0  # with its gradient, and in float32
    split = own.fsdp_size or host.ranks
    weights = _WIDTHS[own.model_dtype] * size.parameters / split
    state = trained_of(own, size) * state_of(own) / split
    works = _WIDTHS[own.model_dtype] * trained_of(own, size) / split + _gathered(size, width) + kept + logits
    moved = (weights if own.param_offload else 0) + (state if own.optimizer_offload else 0)
    return Part("actor" if actor else "critic", weights + state - moved + _IDLE, works + moved)


def _gathered(size: Size, width: int) -> float:
    """Returns the bytes of weights that a pass has whole: the embeddings, and this layer and the next."""
    return float(width) * (size.embeddings + 2 * size.layer)
