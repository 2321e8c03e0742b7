"""Memory that a run needs, estimated from the sizes of its models: per GPU, of the CPU, and of its checkpoints.

The weights that are trained are float32, as verl keeps them: 4 bytes a parameter, 8 for AdamW's two moments, and 4 for
the gradient while an update computes; sharded over the ranks of the trainer. A pass computes with bfloat16 copies, of
which the embeddings and two layers are whole at a time, and keeps one activation a layer (gradient checkpointing) and
the logits. vLLM takes its share of a GPU, of which the KV cache is what its weights leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.models.size import Size, size_of
from dataflow.running.preparing.machine import GIB
from dataflow.running.services.hosting import CRITIC, REPLICAS, TRAINER, VLLM_ON_GPU
from dataflow.running.services.servers import SERVERS
from dataflow.stage import Hosted

_IDLE = 1.0 * GIB
"""Of each process on a GPU: its CUDA context, and what its libraries allocate."""
_ENGINE_WORK = 2.0 * GIB
"""vLLM's activations and CUDA graphs, about."""
_TEACHER = "dataflow.engines.verl.teacher:VerlTeacher"
_TRAINED = (TRAINER, CRITIC)


@dataclass(frozen=True)
class Part:
    """What a service takes of each of its GPUs, in bytes.

    Attributes:
        name: of the service.
        held: all the time; by an engine that sleeps, while it is awake.
        works: more while it computes.
        sleeps: whether it frees what it holds while others compute.
        share: of the GPU's memory that it takes whatever its model; 0 for what the model needs.
        cached: bytes of its KV cache for a token; 0 if it keeps none between its calls.
    """

    name: str
    held: float
    works: float = 0.0
    sleeps: bool = False
    share: float = 0.0
    cached: float = 0.0

    def holds(self, total: float) -> float:
        """Returns the bytes that it holds on a GPU of that many."""
        return max(self.held, self.share * total)

    def tokens(self, total: float) -> int:
        """Returns the tokens that its KV cache has room for on a GPU of that many bytes."""
        return int(max(0.0, self.share * total - self.held) / self.cached) if self.cached else 0


@dataclass(frozen=True)
class Need:
    """What a run needs.

    Attributes:
        pools: the services on each GPU of a pool, by the pool's name.
        cpu: bytes of CPU memory, on all machines together.
        checkpoint: bytes of one checkpoint.
        model: bytes of the exported model, at most.
    """

    pools: Mapping[str, Sequence[Part]]
    cpu: float
    checkpoint: float
    model: float


def need_of(config: Any, hosts: Mapping[str, Hosted]) -> Need:
    """Returns what a run needs.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig` whose models are directories.
        hosts: of its services, by name.

    Raises:
        ModelError: a model's configuration cannot be read.
        NotChecked: a model's size cannot be told from its configuration.
    """
    shared = config.placement == "colocated"
    pools: dict[str, list[Part]] = {}
    cpu = checkpoint = model = 0.0
    for name, host in hosts.items():
        here = name == "rollout" and host.factory != SERVERS
        size = size_of(host.options.get("model") or config.model.path) if here or _loads(host) else None
        if size is None:
            continue
        whole = float(size.parameters)
        if host.factory in _TRAINED:
            pools.setdefault("GPU" if shared else "training GPU", []).append(_trained(config, host, size))
            checkpoint += 12 * whole if config.checkpoint.every else 0
            cpu += 16 * whole if config.checkpoint.every else 4 * whole  # the copy for it, and that for the engine
            cpu += 4 * whole if host.options.get("reference") else 0  # on the GPUs only while it computes
            model += 4 * whole if host.factory == TRAINER and config.checkpoint.export else 0
        elif host.factory == _TEACHER:
            part = Part("teacher", 4 * whole / host.ranks + _IDLE, _gathered(size))
            pools.setdefault("teacher GPU", []).append(part)
        else:
            part = _engine(config, host, size)
            pools.setdefault("GPU" if shared else "rollout GPU", []).append(part)
            cpu += 2 * whole if part.sleeps and part.share else 0  # its weights, while it sleeps
    return Need(pools, cpu, checkpoint, model)


def peak(parts: Sequence[Part], total: float) -> float:
    """Returns the most bytes that services take of a GPU of ``total`` bytes, one of them computing at a time."""
    found = 0.0
    for part in parts:
        others = sum(each.holds(total) for each in parts if each is not part and not each.sleeps)
        found = max(found, others + part.holds(total) + part.works)
    return found


def shown(parts: Sequence[Part], total: float) -> str:
    """Returns what each service takes of a GPU of ``total`` bytes, as a clause."""
    clauses = []
    for part in parts:
        text = f"{part.name} {gib(part.holds(total))}"
        if part.works:
            text += f", computing {gib(part.holds(total) + part.works)}"
        if tokens := part.tokens(total):
            text += f" with a KV cache of {tokens:,} tokens"
        clauses.append(text)
    return "; ".join(clauses)


def gib(size: float) -> str:
    """Returns a number of bytes in GiB, or in MiB if it is small.

    >>> gib(2**30 * 1.23), gib(2**30 * 123.4), gib(2**20 * 3.2)
    ('1.2 GiB', '123 GiB', '3 MiB')
    """
    number = size / GIB
    if number < 0.1:
        return f"{size / 2**20:.0f} MiB"
    return f"{number:.1f} GiB" if number < 100 else f"{number:,.0f} GiB"


def _loads(host: Hosted) -> bool:
    return host.factory in _TRAINED or host.factory == _TEACHER


def _engine(config: Any, host: Hosted, size: Size) -> Part:
    factory, options = host.factory, host.options
    if factory == REPLICAS:
        factory, options = options["factory"], options["options"]
    if factory != VLLM_ON_GPU:  # transformers, in float32, with a cache of all samples
        rows = config.data.prompts * config.engine.n
        tokens = rows * (config.data.max_prompt_length + config.response_length)
        return Part("rollout", 4.0 * size.parameters + _IDLE, 4.0 * size.cached * tokens)
    workers = config.engine.tensor_parallel
    held, cached = 2 * size.parameters / workers + _ENGINE_WORK, 2 * size.cached / workers
    sleeps = config.placement == "colocated"
    if (given := options.get("kv_cache_bytes")) is not None:
        return Part("rollout", held + given, sleeps=sleeps)
    return Part("rollout", held, sleeps=sleeps, share=options["gpu_memory"], cached=cached)


def _trained(config: Any, host: Hosted, size: Size) -> Part:
    actor, ranks = host.factory == TRAINER, host.ranks
    own = host.options["trainer" if actor else "critic"]
    # A rank has at most its rows of a mini-batch in one pass.
    rows = max(1, config.data.prompts // config.trainer.mini_batches * config.engine.n // ranks)
    longest = config.data.max_prompt_length + config.response_length
    tokens = getattr(own, "max_tokens_per_gpu", None) or longest * min(own.micro_batch_size, rows)
    # A layer is computed again for its gradient: about ten activations of its width and four of its feed-forward part.
    kept = 2 * tokens * (size.hidden * (size.layers + 10) + 4 * size.intermediate)
    logits = 8 * tokens * size.vocabulary if actor else 0  # bfloat16 with its gradient, and float32
    works = 4 * size.parameters / ranks + _gathered(size) + kept + logits
    return Part("actor" if actor else "critic", 12 * size.parameters / ranks + _IDLE, works)


def _gathered(size: Size) -> float:
    """Returns the bytes of bfloat16 weights that a pass has whole: the embeddings, and this layer and the next."""
    return 2.0 * (size.embeddings + 2 * size.layer)
