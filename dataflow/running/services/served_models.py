"""The reward models that a run serves: checked before anything starts, and served while the run trains."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from loguru import logger

from dataflow.config.reward import JudgeConfig, Source, model_of, source_of, sources_of
from dataflow.config.run import RunConfig
from dataflow.config.served import ServedModelConfig
from dataflow.engines.choice import vllm_device
from dataflow.errors import ConfigError, ModelError, RunError, nearest
from dataflow.files import no_file
from dataflow.models.directory import chat_template, check_chat, check_classifier, room_of
from dataflow.models.head import labels_of
from dataflow.models.tokenizer import load_tokenizer
from dataflow.rewards.functions import load_reward, takes
from dataflow.rewards.managers import scores_alone
from dataflow.rewards.models.conversation import check_template, read_template
from dataflow.rewards.models.gpus import VISIBLE, GpuPlan, Wanted, plan_gpus, visible_gpus
from dataflow.rewards.models.keeper import ModelServers
from dataflow.rewards.models.router_keeper import RouterKeeper
from dataflow.rewards.models.site import Site
from dataflow.rewards.naming import keyed
from dataflow.running.services.colocation import flag_of, sleepers_of
from dataflow.running.services.hosting import REWARD, gpus_of
from dataflow.running.services.nodes import CONTROLLER, on_cluster
from dataflow.running.services.placed_models import PlacedModel, is_placed, listening_address, plan_of
from dataflow.stage import Hosted

LOGS = "servers"
"""Directory of the servers' logs in a run's directory."""
SAID_S = 30.0
"""Seconds after which a start that takes long is said, again and again."""


def check_models(config: RunConfig, agents: Iterable[str], hosts: Iterable[Hosted] = ()) -> None:
    """Checks the reward models of a run, without starting anything.

    Args:
        config: of the run.
        agents: names of its reward agents.
        hosts: of all its services, whose GPUs are not free.

    Raises:
        ConfigError: a model cannot be served, an agent names one that is not there, or no agent uses one.
    """
    models, scoring, asked, free = config.reward.models, set[str](), False, list[str]()
    for name in agents:
        source = source_of(config, name)
        scorer = model_of(config, source)
        if scorer is not None and scorer not in models:
            words = keyed(f"reward.model={scorer}: there is no reward model of that name", name)
            others = f"name one of reward.models ({', '.join(models)}), or " if models else ""
            raise ConfigError(f"{words}{nearest(scorer, models) or f'; {others}give reward.models.{scorer}.path.'}")
        try:
            _check_effect(source, scorer)
        except ConfigError as error:
            raise ConfigError(keyed(str(error), name)) from error
        if scorer is not None:
            scoring.add(scorer)
        elif source.custom.path is None:
            free.append(name)
        asked |= bool(models) and _asks(source)
    for name, model in models.items():
        if name not in scoring and not asked:
            raise ConfigError(
                f"reward.models.{name}: no reward agent uses it; "
                f"{f'give {free[0]}.model={name}, or ' if free else ''}leave it out (a function asks it only with a "
                "parameter reward_router_address)."
            )
        if name not in scoring and model.normalize != "none":  # a function scores
            raise ConfigError(
                f"reward.models.{name}.normalize={model.normalize} has no effect: a function gets what the server "
                "answers; leave it out."
            )
        try:
            _check_model(model, "cuda" if config.ray.gpus_per_worker else "cpu", name in scoring)
        except (ConfigError, ModelError) as error:
            raise ConfigError(f"reward.models.{name}: {error}") from error
    if config.ray.gpus_per_worker:
        _gpus(config, hosts)


def _check_effect(source: Source, scorer: str | None) -> None:
    """Checks that no key of an agent is without effect because of what scores for it.

    Raises:
        ConfigError: one is, by its name in the agent reward.
    """
    options, custom, judge = source.options, source.custom, source.judge
    if scorer is not None and custom.path is not None:
        raise ConfigError(
            f"reward.model={scorer} has no effect: the function of custom_reward_function.path={custom.path} scores, "
            "and reaches all models at reward_router_address; leave one of the two out."
        )
    changed = [key for key, value in JudgeConfig() if key not in _STAND_IN and getattr(judge, key) != value]
    if changed and scores_alone(options.manager, options.manager_path):
        raise ConfigError(f"judge.{changed[0]} has no effect: reward.manager={options.manager} scores; leave it out.")
    if scorer is None:
        return
    if changed:
        raise ConfigError(
            f"judge.{changed[0]} has no effect: reward model '{scorer}' scores; leave it out, or give the key of "
            f"reward.models.{scorer} (prompt, url)."
        )
    if unread := [key for key in ("router_address", "model_tokenizer") if getattr(options, key) is not None]:
        raise ConfigError(
            f"reward.{unread[0]} has no effect: it is for a function, and reward model '{scorer}' scores; leave it out."
        )


_STAND_IN = ("latency", "time_scale")
"""Keys of the judge's stand-in, which recipes and scripts set for whatever scores."""


def _asks(source: Source) -> bool:
    """Whether an agent's function asks the run's models at the address of their router."""
    path = source.custom.path
    if path is None or source.options.router_address is not None:
        return False
    found = load_reward(path, source.custom.name, source.custom.reward_kwargs)
    return takes(found, "reward_router_address") and "reward_router_address" not in source.custom.reward_kwargs


def _gpus(config: RunConfig, hosts: Iterable[Hosted]) -> GpuPlan:
    """Returns the GPUs of the servers and of the run.

    Raises:
        ConfigError: there are too few, or servers of a cluster would share them.
    """
    wanted = {
        name: Wanted(model.replicas, model.tensor_parallel, model.placement == "own")
        for name, model in config.reward.models.items()
        if model.url is None
    }
    if on_cluster(config):  # Ray gives the servers their GPUs
        if shared := [name for name, each in wanted.items() if not each.own]:
            raise ConfigError(
                f"reward.models.{shared[0]}.placement=colocated: on a cluster (ray.address) servers cannot share the "
                "GPUs of trainer and engine; give placement=own, or the url of servers that run elsewhere."
            )
        return GpuPlan([], {})
    return plan_gpus(wanted, gpus_of(hosts), visible_gpus()) if wanted else GpuPlan([], {})


def _check_model(model: ServedModelConfig, device: str, scores: bool) -> None:
    if model.path is None:
        return
    path = Path(model.path).expanduser()
    if model.url is not None:  # its tokenizer is all that is read
        if not path.is_dir():
            raise ConfigError(f"model {path} {'is no directory' if path.exists() else 'does not exist'}; leave it out.")
        return
    if model.kind == "chat":
        check_chat(path)
    else:
        check_classifier(path, model.kind, model.engine)
        labels = labels_of(path)
        if scores and labels not in (None, 1):
            raise ConfigError(
                f"model {path} answers {labels} numbers (labels), where a score is one; give a model with one label, "
                "or a reward function that makes a score of them."
            )
    if model.template is None:
        if not chat_template(path):
            raise ConfigError(f"model {path} has no chat template; give template, a Jinja file.")
    elif (why := no_file(Path(model.template).expanduser())) is not None:
        raise ConfigError(f"template={model.template}: {why}; give a Jinja file.")
    elif model.kind == "chat":  # the template of a classifier is checked where its client is
        where = f"template={model.template}"
        check_template(load_tokenizer(str(path), "path"), read_template(model.template, where), where)
    positions = room_of(path).positions
    if model.max_model_len is not None and positions is not None and model.max_model_len > positions:
        raise ConfigError(f"max_model_len={model.max_model_len}: model {path} reads {positions} tokens; lower it.")
    for key in ("tensor_parallel", "gpu_memory"):
        given, default = getattr(model, key), ServedModelConfig.model_fields[key].default
        if given != default and device == "cpu":
            raise ConfigError(f"{key}={given}: this run has no GPUs (ray.gpus_per_worker=0); leave it out.")
    if model.engine == "vllm" and (found := vllm_device()) != device:
        there = "is not installed" if found is None else f"that is installed is for {_DEVICES[found]}"
        raise ConfigError(
            f"vLLM {there}, and this run serves its models on {_DEVICES[device]}; pip install "
            f"'dataflow-rl[{'cpu' if device == 'cpu' else 'gpu'}]', give engine=hf for a tiny classifier, or the url "
            "of a server."
        )


_DEVICES = {"cpu": "the CPU", "cuda": "GPUs"}


class ServedModels:
    """The servers of the reward models that have no address, and one address of all models for users' functions.

    A context manager, which writes the addresses into the configuration.

    Args:
        config: of the run.
        directory: of the run, for the servers' logs.
        on_lost: called from any thread when a model cannot be served any more.
        hosts: of the run's services.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: Path,
        on_lost: Callable[[RunError], None],
        hosts: Iterable[Hosted] = (),
    ) -> None:
        self._gpus = _gpus(config, hosts) if config.ray.gpus_per_worker else GpuPlan([], {})
        self._models: list[ModelServers] = []
        self._config, self._directory, self._on_lost = config, directory, on_lost
        self._askers = [CONTROLLER, *(host.name for host in hosts if host.factory == REWARD)]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> ServedModels:
        address = listening_address(self._config, self._askers)
        with contextlib.ExitStack() as stack:
            served = {name: model for name, model in self._config.reward.models.items() if model.url is None}
            sites = {name: self._sites(name, model, address, stack) for name, model in served.items()}
            for name, model in served.items():
                servers = self._servers(name, model, sites[name])
                self._models.append(stack.enter_context(servers))
                model.url = list(servers.urls)
            if self._gpus.servers:
                stack.enter_context(_visible(self._gpus.run))
            if self._gpus.servers and sleepers_of(self._config):
                # vLLM measures the free memory of its GPUs when it starts: before trainer and engine take theirs.
                asyncio.run(self.ready())
            functions = [source.options for source in sources_of(self._config) if source.custom.path]
            if asking := [options for options in functions if options.router_address is None]:
                models = {name: model.client_options(name) for name, model in self._config.reward.models.items()}
                router = stack.enter_context(RouterKeeper(models, self._on_lost, address=address))
                for options in asking:
                    options.router_address = router.address
            self._stack = stack.pop_all()
        return self

    def _sites(self, name: str, model: ServedModelConfig, address: str, stack: contextlib.ExitStack) -> Sequence[Site]:
        """Returns the places of a model's servers: of its own, on nodes of the cluster, or on this machine."""
        config = self._config
        plan = plan_of(name, model, "cuda" if config.ray.gpus_per_worker else "cpu", config.trainer.threads)
        if is_placed(config, name):
            placed = PlacedModel(name, model, config, plan, self._directory, address)
            return stack.enter_context(placed).sites
        gpus = self._gpus.servers.get(name, ())
        return [plan.site(address, gpus[number] if gpus else None) for number in range(model.replicas)]

    def _servers(self, name: str, model: ServedModelConfig, sites: Sequence[Site]) -> ModelServers:
        return ModelServers(
            name,
            sites,
            logs=self._directory / LOGS,
            start_s=model.start_timeout,
            restarts=model.restarts,
            on_lost=self._on_lost,
            flag=self._directory / flag_of(name) if model.placement == "colocated" else None,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def waits(self) -> bool:
        """Whether :meth:`ready` has anything to wait for."""
        return bool(self._models or sleepers_of(self._config))

    def facts(self) -> dict[str, Any]:
        """Returns what the summary says about the models that the run serves."""
        found = {each.name: {"servers": len(each.urls), "restarts": each.restarted} for each in self._models}
        return {"reward_models": found} if found else {}

    async def ready(self) -> None:
        """Waits until all servers answer, and puts those that share GPUs to sleep.

        Raises:
            RunError: one did not start, or cannot sleep.
        """
        left: Any = {asyncio.wrap_future(servers.ready) for servers in self._models}
        for each in left:  # the run may be cancelled with the same error before it is read here
            each.add_done_callback(lambda done: done.cancelled() or done.exception())
        while left:
            done, left = await asyncio.wait(left, timeout=SAID_S, return_when=asyncio.FIRST_EXCEPTION)
            for each in done:
                each.result()
            if left:
                waited = [servers.words for servers in self._models if not servers.ready.done()]
                logger.info(f"{'; '.join(waited)}: the others are starting")
        for sleeper in sleepers_of(self._config):
            await sleeper.sleep()


@contextlib.contextmanager
def _visible(gpus: Sequence[str]) -> Iterator[None]:
    """Shows only these GPUs to Ray and to this process's workers."""
    before = {name: value for name, value in os.environ.items() if name == VISIBLE}
    os.environ[VISIBLE] = ",".join(gpus)
    try:
        yield
    finally:
        os.environ.pop(VISIBLE, None)
        os.environ |= before
