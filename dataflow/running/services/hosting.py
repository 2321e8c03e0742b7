"""The hosts of a run's services, from its configuration: which object, with which options, on how many GPUs."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.config.reward import asked_of, concurrency_of, model_of, source_of
from dataflow.engines.choice import refused_temperature, rollout_engine
from dataflow.errors import ConfigError, ModelError
from dataflow.models.size import count
from dataflow.rewards.naming import JUDGE, MAIN, SERVED, file_of
from dataflow.running.services.nodes import node_labels
from dataflow.stage import Hosted

HF = "dataflow.engines.hf:HfRollout"
VLLM = "dataflow.engines.vllm.engine:VllmRollout"
SERVERS = "dataflow.engines.http.engine:HttpRollout"
REPLICAS = "dataflow.running.services.replicas:build_replicas"
TRAINER = "dataflow.engines.verl.trainer:VerlTrainer"
CRITIC = "dataflow.engines.verl.trainer:VerlCritic"
REWARD = "dataflow.running.services.agent:build_agent"
ROUTER = "127.0.0.1:0"
"""Address of the reward models for users' functions while it is not known."""
_CLOSE_S = 8.0  # time for vLLM's processes to end and free their shared memory
# Shares of a GPU for trainer, critic and engine; colocated reward models have the rest. On a shared GPU the trainer's
# share is over half of it, the critic's over half of the rest, and so on, so that Ray, which places the largest shares
# first, puts no two ranks on one GPU.
SHARES = {
    ("colocated", False): (0.6, 0.0, 0.25),
    ("colocated", True): (0.6, 0.24, 0.1),
    ("disaggregated", False): (1.0, 0.0, 1.0),
    ("disaggregated", True): (0.6, 0.4, 1.0),
}


@dataclass(frozen=True)
class Pools:
    """The GPUs of a run.

    Attributes:
        training: resource that the trainer's stages occupy.
        sampling: resource that the engine's stages occupy; the same one if both share their GPUs.
        trainer_gpus: GPUs of each trainer rank, or the share of one; 0 computes on the CPU.
        engine_gpus: GPUs of each worker of the engine, likewise.
        critic_gpus: GPUs of each rank of the critic, likewise; it shares those of the trainer.
    """

    training: str
    sampling: str
    trainer_gpus: float
    engine_gpus: float
    critic_gpus: float = 0.0

    @property
    def shared(self) -> bool:
        """Whether trainer and engine use the same pool."""
        return self.training == self.sampling

    @property
    def resources(self) -> dict[str, int | None]:
        """The slots of each resource of a pipeline with these pools."""
        return self.with_agents()

    def with_agents(self, *names: str) -> dict[str, int | None]:
        """Returns the resources, with one for each further reward agent, on which its rewards are collected."""
        agents = dict.fromkeys((MAIN, *names))  # beside each other on the timeline
        return {self.training: 1, self.sampling: 1, **agents, "controller": 1, "io": 1}


def pools_of(config: Any, *, critic: bool = False) -> Pools:
    """Returns the GPU pools of a run: one that all share, or one each for trainer and engine.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        critic: whether the trainer shares its GPUs with a critic.

    Raises:
        ConfigError: GPUs cannot be shared this way.
    """
    gpus, apart = config.ray.gpus_per_worker, config.placement == "disaggregated"
    if gpus not in (0, 1) and (critic or not apart):
        who = "trainer and critic" if apart else "colocated, engine and trainer"
        other = "" if apart else ", or placement=disaggregated"
        raise ConfigError(
            f"ray.gpus_per_worker={gpus:g}: {who} share whole GPUs; give 1, a rank for each GPU "
            f"(trainer.world_size){other}."
        )
    trainer_share, critic_share, engine_share = SHARES[config.placement, critic]
    training, sampling = ("train", "rollout") if apart else ("gpu", "gpu")
    if config.engine.rollout == "http":
        engine_share = 0.0  # their GPUs are elsewhere
    return Pools(training, sampling, gpus * trainer_share, gpus * engine_share, gpus * critic_share)


def gpus_of(hosts: Iterable[Hosted]) -> int:
    """Returns how many GPUs services need together; those that share one count once."""
    shares, alone = 0.0, 0
    for host in hosts:
        if host.factory == REPLICAS:
            of, number = host.options["gpus"], host.options["devices"] * host.options["number"]
        else:
            of, number = host.gpus, host.devices * host.ranks
        shares += of * number
        alone += number if 0.5 < of < 1 else 0  # no two such shares fit on one GPU
    return max(alone, math.ceil(round(shares, 6)))


def trainer_host(config: Any, pools: Pools) -> Hosted:
    """Returns the host of the trained actor, named ``trainer``."""
    return Hosted(
        "trainer",
        TRAINER,
        {
            "model": config.model.path,
            "trainer": config.trainer,
            "algorithm": config.algorithm,
            "total_steps": config.steps,
            "response_length": config.response_length,
            "temperature": config.engine.temperature,
            "seed": config.seed,
            "device": "cuda" if pools.trainer_gpus else "cpu",
            "reference": config.algorithm.reference,
            "shares_gpu": pools.trainer_gpus > 0 and (pools.shared or pools.critic_gpus > 0),
        },
        ranks=config.trainer.world_size,
        gpus=pools.trainer_gpus,
        concurrent=True,  # a checkpoint is written while it trains
        run_directory=config.checkpoint.export,
    )


def critic_host(config: Any, pools: Pools) -> Hosted:
    """Returns the host of the critic, named ``critic``.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig` with a section ``critic``.
        pools: made with ``critic=True``.
    """
    return Hosted(
        "critic",
        CRITIC,
        {
            "model": config.critic.path or config.model.path,
            "critic": config.critic,
            "total_steps": config.steps,
            "seed": config.seed,
            "device": "cuda" if pools.critic_gpus else "cpu",
            "threads": config.trainer.threads,
            "shares_gpu": pools.critic_gpus > 0,
        },
        ranks=config.trainer.world_size,
        gpus=pools.critic_gpus,
        concurrent=True,  # a checkpoint is written while it trains
    )


def reward_host(config: Any, name: str = MAIN, default: str | None = None) -> Hosted:
    """Returns the host of a reward agent: of the user's function, else of a reward model, a default or the judge.

    It runs beside the command, where its ledger, its files and the servers that the run starts are.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        name: of the agent and of its host: ``reward``, or a section of type
            :class:`~dataflow.config.reward.SourceConfig`.
        default: a function or class, as ``"package.module:name"``, that scores if no reward model does.

    Raises:
        ConfigError: the configuration has no such agent.
    """
    source, models = source_of(config, name), config.reward.models
    _name, options, custom, judge = source
    own = {"target": JUDGE, "kwargs": judge.client_options()} if default is None else {"target": default}
    update: dict[str, Any] = {}
    if (model := model_of(config, source)) in models and not custom.path:
        served = models[model]
        own = {"target": SERVED, "kwargs": served.client_options(model), "scoring": served.scoring(model)}
        update["concurrency"] = concurrency_of(config, source)
    if custom.path and models:
        update |= {"models": models, "router_address": options.router_address or ROUTER}
    if options.manager == "dapo" and options.manager_path is None:
        update["manager_kwargs"] = {"max_response_length": config.response_length, **options.manager_kwargs}
    asked = models.get(model or asked_of(config, source))
    # Rebuilt by itself it would send its requests again, and wake a model while others use its GPUs.
    rebuilt = asked is None or asked.placement != "colocated"
    return Hosted(
        name,
        REWARD,
        {
            "name": name,
            "custom": custom.model_dump(),
            "default": own,
            "options": options.model_copy(update=update) if update else options,
            "ledger": config.run_file(file_of("rewards.sqlite", name)),
            "tokenizer": config.model.path,
        },
        concurrent=True,
        restarts=options.restarts if rebuilt else 0,
        here=True,
        run_directory=options.ledger,
    )


def rollout_host(config: Any, gpus: float) -> Hosted:
    """Returns the host of the rollout engine, named ``rollout``; the engine need not be installed to draw the graph.

    Args:
        config: a :class:`~dataflow.config.run.RunConfig`.
        gpus: for each of the engine's workers, shares allowed; 0 samples on the CPU.

    Raises:
        ConfigError: the engine does not support an option.
    """
    draw = config.engine
    device = "cuda" if gpus else "cpu"
    kind = engine_kind(config, device=device)
    for key, value in (("engine", draw.temperature), ("val", config.val.temperature)):
        if why := refused_temperature(value, kind):
            raise ConfigError(f"{key}.temperature={value:g}: {why}.")
    # The prompt of a later turn includes the turns before it.
    turns = config.tools.max_response_tokens if config.tools.offered else 0
    longest = config.data.max_prompt_length + turns
    if kind == "http":
        return _servers_host(config, longest)
    options: dict[str, Any] = {
        "model": config.model.path,
        "max_prompt_length": longest,
        "threads": config.trainer.threads,
        "device": device,
    }
    factory, workers = HF, draw.tensor_parallel
    if kind == "vllm":
        factory = VLLM
        options |= {
            "max_tokens": draw.max_tokens,
            "max_num_seqs": draw.max_num_seqs,
            "gpu_memory": config.engine_memory,
            "tensor_parallel": workers,
            "in_flight": draw.in_flight,
        }
        if turns:
            options["max_model_len"] = longest
        if gpus:
            options |= {"dtype": "bfloat16", "kv_cache_bytes": None}
        if draw.kv_cache_gb:
            options["kv_cache_bytes"] = int(draw.kv_cache_gb * 2**30)
    elif workers > 1:
        raise ConfigError(f"engine.tensor_parallel={workers}: the transformers engine has one worker; use vllm.")
    if draw.replicas > 1:
        if config.executor == "inline":
            raise ConfigError(f"engine.replicas={draw.replicas} needs processes of their own; use executor=ray.")
        options = {
            "factory": factory,
            "options": options,
            "number": draw.replicas,
            "slots": draw.max_num_seqs,
            "gpus": gpus,
            "devices": workers,
            "threads": config.trainer.threads,
            "nodes": node_labels(config).get("rollout"),
        }
        factory, gpus, workers = REPLICAS, 0.0, 1
    return Hosted(
        "rollout",
        factory,
        options,
        gpus=gpus,
        devices=workers,
        concurrent=True,
        restarts=draw.restarts,
        # vLLM measures the free memory of its GPUs; it would count a trainer that loads meanwhile as its own.
        alone=device == "cuda" and config.placement == "colocated",
        close_s=_CLOSE_S if kind == "vllm" else 1.0,
        run_directory=bool(turns),  # it has why a tool froze
    )


def _servers_host(config: Any, longest: int) -> Hosted:
    """Returns the host of the client of inference servers that run elsewhere."""
    draw = config.engine
    return Hosted(
        "rollout",
        SERVERS,
        {
            "model": config.model.path,
            "max_prompt_length": longest,
            "urls": list(draw.urls),
            "max_model_len": config.data.max_prompt_length + config.response_length,
            "api_key_env": draw.api_key_env,
            "slots": draw.max_num_seqs,
            "timeout": draw.request_timeout,
            "tries": draw.request_tries,
            "wait": draw.server_wait,
            "weights_dir": _weights_directory(config),
            "in_flight": draw.in_flight,
        },
        concurrent=True,
        restarts=draw.restarts,
        here=True,  # it may reach servers that only this machine does
        run_directory=draw.weights_dir is None,
    )


def _weights_directory(config: Any) -> str | None:
    """Returns the directory for the weights of a run, which is the same after a resume; None for a temporary one."""
    if not config.engine.weights_dir:
        own = config.run_file("weights")
        return None if own is None else str(own)
    # Runs of one name in other folders, or on other machines, may share engine.weights_dir.
    digest = hashlib.sha256(f"{platform.node()}:{config.run_file('')}".encode()).hexdigest()[:8]
    return str(Path(config.engine.weights_dir, f"{config.name or 'run'}-weights-{digest}"))


def circumstances(config: Any) -> dict[str, Any]:
    """Returns what the choice of the rollout engine depends on, as arguments of :func:`rollout_engine`.

    A :class:`~dataflow.config.run.RunConfig` without a model trains the tiny one.
    """
    path, number = config.model.path, None
    if config.engine.rollout == "auto" and config.engine.tensor_parallel == 1:  # several workers are vLLM's alone
        try:
            number = count(Path(path)) if path else 0
        except (ModelError, OSError):
            number = None  # a name on the hub; a directory is checked before the run
    return {
        "own_process": config.executor != "inline",
        "device": "cuda" if config.ray.gpus_per_worker else "cpu",
        "parameters": number,
    }


def engine_kind(config: Any, **known: Any) -> str:
    """Returns the kind of the rollout engine, whether it is installed or not, with circumstances known otherwise."""
    name = config.engine.rollout
    return str(name) if name != "auto" else rollout_engine(name, **circumstances(config) | known)
