"""What a run is made of before it starts: its policy, task graph and inputs; and the one list of its checks.

A start makes :meth:`Preparation.checks` until the first problem; a dry run makes all, and :meth:`Preparation.needs`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from loguru import logger

from dataflow.config.base import BaseConfig
from dataflow.config.engine import EngineConfig
from dataflow.config.keys.effects import without_effect
from dataflow.config.loading.pipeline_file import inputs_of, pipeline_of
from dataflow.config.loading.saved import CONFIG, ORIGIN, PACKAGES, read_values
from dataflow.config.reward import JudgeConfig, Source, model_of, source_of, sources_of
from dataflow.config.run import ModelConfig, RunConfig
from dataflow.config.training import CriticConfig, toy_critic, toy_trainer
from dataflow.engines.choice import rollout_engine, why_transformers
from dataflow.errors import ConfigError, NotChecked, UserError, counted
from dataflow.executors.ray.nodes import check_count, visible_gpus
from dataflow.files import unmakable
from dataflow.graph import Hosted, TaskGraph
from dataflow.models.directory import chat_template, check_model, check_weights, room_of
from dataflow.models.processor import takes_images
from dataflow.models.size import size_of
from dataflow.planning.auto import opening
from dataflow.policy import PolicySchedule, SchedulingPolicy, expand
from dataflow.rewards.managers import scores_alone
from dataflow.rewards.naming import JUDGE, keyed
from dataflow.runner import Ahead
from dataflow.running.directory import check_directory
from dataflow.running.preparing.check import Check
from dataflow.running.preparing.machine import GIB, free_disk, gib, gpu_memory
from dataflow.running.preparing.memory import Need, need_of, peak
from dataflow.running.replanning import load_schedule, policies_of
from dataflow.running.reporting.progress import Progress
from dataflow.running.services.hosting import REWARD, circumstances, engine_kind, gpus_of
from dataflow.running.services.nodes import check_nodes
from dataflow.running.services.training import check_trained
from dataflow.system.address import without_login
from dataflow.system.extras import mismatched, not_installed

if TYPE_CHECKING:
    from dataflow.data.prompts import Problems, PromptSource

_STAND_IN = ("latency", "time_scale")
"""Keys of the judge's stand-in, which recipes and scripts set for whatever scores."""
_TRACKED = ("clearml", "mlflow", "swanlab", "tensorboard", "trackio", "wandb")
"""Backends of metrics that are packages of the same name."""
_TINY = 20_000_000
"""Weights below which a model is a tiny one; those of the recipes have about a million."""
_LEAST_DISK = GIB // 10
"""Bytes for what a run writes besides models."""


class Preparation:
    """A run before it starts; the arguments are those of :class:`~dataflow.running.session.Session`.

    Args:
        patience_s: seconds to wait for servers elsewhere; None waits as long as their ``start_timeout``.

    Attributes:
        graph: the run's tasks, once the checks have made it.
        schedule: the policies of the steps: those that a run has had so far, if it changes them, and the last one.
        inputs: the pipeline's input fields, a function of the step each, once the checks have made them.
        digests: hashes of what decides the samples of each step, by the key that gives it, likewise.
    """

    graph: TaskGraph
    inputs: Mapping[str, Callable[[int], Any]]
    digests: Mapping[str, str] = {}

    def __init__(
        self,
        config: BaseConfig,
        module: ModuleType,
        progress: Progress,
        directory: Path | None = None,
        *,
        patience_s: float | None = None,
    ) -> None:
        self.config = config.model_copy(deep=True)
        self.module = module
        self.directory = directory
        self.policy: SchedulingPolicy = config.policy.resolve(config.optimizer_steps)
        known = load_schedule(directory) if directory is not None and config.policy.auto else None
        if known is not None and (order := known.changes[0][1].order) != self.policy.order:
            raise ConfigError(
                f"policy.order={self.policy.order}: the run was begun with policy.order={order}, which holds for all "
                "its steps; leave it out."
            )
        self.schedule = known or PolicySchedule(((1, self.policy),))
        self._opens = config.policy.auto and known is None
        self._progress, self._patience_s = progress, patience_s
        self._problems: tuple[Problems, Problems] | None = None
        self._sources: tuple[PromptSource, PromptSource] | None = None
        self._need: Need | None = None

    @property
    def hosts(self) -> Mapping[str, Hosted]:
        """The hosts of the run's services, by name; empty before there is a graph."""
        return self.graph.pipeline.hosts() if hasattr(self, "graph") else {}

    @property
    def agents(self) -> dict[str, Hosted]:
        """Those of the run's own reward agents; empty if no stage uses one."""
        return {name: host for name, host in self.hosts.items() if host.factory == REWARD}

    @property
    def judges(self) -> dict[str, JudgeConfig]:
        """The judges that score, by the name of the agent: those of agents that nothing else scores for."""
        found = {}
        for name, host in self.agents.items():
            source = source_of(self.config, name)
            alone = source.custom.path or scores_alone(source.options.manager, source.options.manager_path)
            if host.options["default"]["target"] == JUDGE and not alone:
                found[name] = source.judge
        return found

    @property
    def stand_ins(self) -> dict[str, JudgeConfig]:
        """Those of the judges that have no address, for which the run starts a stand-in."""
        return {name: judge for name, judge in self.judges.items() if judge.url is None}

    def expand(self, first: int = 1) -> TaskGraph:
        """Returns the run's task graph from a step on (and keeps it)."""
        config = self.config
        self.graph = expand(
            pipeline_of(self.module, config),
            self.schedule,
            config.steps,
            config.optimizer_steps,
            groups=config.step_groups,
            first=first,
        )
        return self.graph

    # --- the list ---------------------------------------------------------------------------------------------

    def checks(self) -> list[Check]:
        """Returns the checks that a start makes, in its order; they need no service and write nothing."""
        config = self.config
        general = [
            Check("packages", partial(check_packages, config)),
            Check("tracking", self._check_tracking),
            Check("directory", self._check_directory),
            Check("pipeline", self._build),
            Check("pipeline", lambda: self.graph.pipeline.unread(), ("pipeline",)),
        ]
        if not isinstance(config, RunConfig):
            return [*general, Check("inputs", self._take, ("pipeline",))]
        return [
            *general,
            # Before the default model is made, which takes a minute, what is wrong at once.
            Check("engine", lambda: self._check_engine(config)),
            Check("reward models", lambda: self._check_models(config), ("pipeline",)),
            *(Check(s.name, partial(self._check_agent, s), self._of_agent(s)) for s in sources_of(config)),
            Check("data", lambda: self._read(config)),
            Check("model", lambda: settle_models(config, self._progress)),
            Check("lengths", lambda: check_fits(config), ("model",)),
            *(Check(name, partial(self._check_trained, config, name)) for name in config.trained),
            Check("prompts", lambda: self._tokenize(config), ("data", "model"), slow=True),
            Check("weights", lambda: check_weights(Path(config.model.path or "")), ("model",)),
            Check("inputs", self._take, ("pipeline", "prompts")),
            Check("model servers", lambda: self._check_model_servers(config)),
            Check("servers", lambda: self._check_servers(config)),
            Check("settings", lambda: list(self._remarks(config))),
        ]

    def needs(self) -> list[Check]:
        """Returns, after the checks of a start, those of what it would find out late: judges, GPUs, memory, disk."""
        config, joins = self.config, self.config.ray.address is not None
        if not self.hosts:
            return []
        judges = {name: judge for name, judge in self.judges.items() if judge.url is not None}
        found = [
            Check("judge" if len(judges) == 1 else f"judge of {name}", partial(self._ask_judge, name), (name,))
            for name in judges
        ]
        from dataflow.running.services.served_models import model_hosts

        gpus = gpus_of([*self.hosts.values(), *model_hosts(config).values()])
        if gpus and not joins:
            found.append(Check("GPUs", lambda: check_count(gpus, len(visible_gpus()))))
        if not isinstance(config, RunConfig):
            return found
        found.append(Check("memory", self._estimate, ("model", *config.trained)))
        if gpus and not joins:
            found.append(Check("GPU memory", self._check_gpu_memory, ("memory",)))
        return [*found, Check("disk", lambda: self._check_disk(config), ("directory",))]

    def _of_agent(self, source: Source) -> tuple[str, ...]:
        return ("pipeline",) if model_of(self.config, source) is None else ("pipeline", "reward models")

    def _hosts(self, name: str) -> bool:
        """Whether the run has a service of that name, as far as is known before there is a graph."""
        return not hasattr(self, "graph") or name in self.hosts

    # --- the graph and its places -----------------------------------------------------------------------------

    def _check_tracking(self) -> None:
        for name in self.config.tracking.backends:
            if name in _TRACKED and importlib.util.find_spec(name) is None:
                raise ConfigError(
                    f"tracking.backends: {name} is not installed; run pip install {name}, or take it out."
                )

    def _check_directory(self) -> str | None:
        if self.directory is not None:
            return None
        check_directory(self.config)
        return f"{Path(self.config.runs, self.config.name or '')} can be written"

    def _build(self) -> str:
        config, policy = self.config, self.policy
        if self._opens:
            made = pipeline_of(self.module, config)
            policies = policies_of(made, config.policy, config.optimizer_steps, config.step_groups)
            self.schedule = opening(policies) if policies else self.schedule  # without one, the graph says why
        pipeline = self.expand().pipeline
        if config.policy.auto and policy.stream_rollout and not pipeline.streaming:
            raise ConfigError("policy.stream_rollout=true: no stage of this pipeline streams; leave it out.")
        check_nodes(config, pipeline.hosts())
        stages = f"{counted(len(pipeline.stages), 'stage')}, {counted(config.steps, 'step')}"
        stages += f" under {config.policy.preset}"
        if config.policy.auto:
            return stages
        return f"{stages} ({counted(policy.split, 'part')}, max_staleness {policy.max_staleness})"

    # --- models -----------------------------------------------------------------------------------------------

    def _check_engine(self, config: RunConfig) -> str | None:
        return rollout_engine(config.engine.rollout, **circumstances(config)) if self._hosts("rollout") else None

    def _check_trained(self, config: RunConfig, name: str) -> None:
        if self._hosts(name):
            settle_critic(config, name)
            check_trained(config, name)

    def _check_servers(self, config: RunConfig) -> str | None:
        """Waits for the inference servers of ``engine.rollout=http``, and checks that they serve the run's model."""
        if config.engine.rollout != "http" or not self._hosts("rollout"):
            return None
        from dataflow.engines.http.engine import check_servers

        draw, model = config.engine, config.model.path
        # On other nodes it is the engine that looks: this machine need not have the directory.
        if draw.weights_dir and "rollout" not in config.ray.nodes and (why := unmakable(draw.weights_dir)) is not None:
            raise ConfigError(f"engine.weights_dir={draw.weights_dir}: {why}")
        here = model is not None and Path(model, "config.json").is_file()
        longest = config.data.max_prompt_length + config.response_length
        wait_s = draw.server_wait if self._patience_s is None else self._patience_s
        found = check_servers(draw.urls, draw.api_key_env, model if here else None, longest, wait_s)
        if not here:
            raise NotChecked(f"they answer ({found}); the model to compare them with is not there yet")
        return found

    # --- rewards ----------------------------------------------------------------------------------------------

    def _check_models(self, config: RunConfig) -> str | None:
        from dataflow.running.services.served_models import check_models

        check_models(config, self.agents)
        return ", ".join(config.reward.models) or None

    def _check_model_servers(self, config: RunConfig) -> str | None:
        """Waits for the reward models that have a url, and checks that they serve a model of the name."""
        from dataflow.rewards.judge.client import models_of

        async def check(name: str, url: str, patience_s: float) -> None:
            setting = f"reward.models.{name}.url"
            listed = await models_of(url, setting, patience_s)
            if listed and name not in listed:
                raise ConfigError(
                    f"{setting}={url}: the server has no model '{name}' but {', '.join(listed[:5])}; start it with "
                    f"--served-model-name {name}, or name the section as the server names its model."
                )

        async def check_all() -> int:
            patience = self._patience_s
            checks = [
                check(name, url, model.start_timeout if patience is None else patience)
                for name, model in config.reward.models.items()
                for url in model.url or ()
            ]
            await asyncio.gather(*checks)
            return len(checks)

        number = asyncio.run(check_all())
        return f"{number} answer" if number else None

    def _check_agent(self, source: Source) -> str | None:
        from dataflow.distribution import parse_distribution
        from dataflow.running.services.agent import check_reward

        name = source.name
        if (host := self.agents.get(name)) is None:
            return None
        options, target = host.options["options"], host.options["default"]["target"]
        limits = check_reward(**host.options)
        first = self.graph.pipeline.collector
        if options.extra_groups and first is not None and first.host is not None and name != first.host.name:
            raise ConfigError(
                f"{name}.on_failure=replace_group: the groups of a part are those of agent '{first.host.name}', so "
                f"that no other can take the place of a failed one; give {name}.on_failure=drop_group."
            )
        if (stand_in := self.stand_ins.get(name)) is not None:
            parse_distribution(stand_in.latency, keyed("judge.latency", name))
        scorer = source.custom.name if source.custom.path else target
        if name in self.judges:
            scorer = "the judge" if stand_in is None else "a stand-in for the judge"
        elif scores_alone(options.manager, options.manager_path):
            scorer = f"{name}.manager={options.manager}"
        changed = [key for key, value in JudgeConfig() if getattr(source.judge, key) != value and key not in _STAND_IN]
        if changed and name not in self.judges:
            said = f"judge.{changed[0]} has no effect: {scorer} scores; leave it out."
            raise ConfigError(keyed(said, name))
        return f"{scorer}, {counted(limits.concurrency, 'request')} in flight"

    def _ask_judge(self, name: str) -> str | list[str]:
        from dataflow.rewards.judge.client import models_of

        judge = self.judges[name]
        assert self._patience_s is not None
        url = without_login(str(judge.url))[0]
        try:
            # For no score, which may cost money.
            listed = asyncio.run(models_of(str(judge.url), "judge.url", self._patience_s, judge.api_key_env))
        except ConfigError as error:
            raise ConfigError(keyed(str(error), name)) from error
        if not listed or judge.model in listed:
            return f"{url} answers"
        # No error: some servers list no aliases.
        said = f"{url} lists no model '{judge.model}' (judge.model): it has {', '.join(listed[:5])}."
        return [keyed(said, name)]

    # --- data -------------------------------------------------------------------------------------------------

    def _read(self, config: RunConfig) -> str:
        from dataflow.data.prompts import read_problems

        self._problems = train, val = read_problems(config.data)
        return f"{train.name}: {counted(len(train.rows), 'row')}; {val.name}: {len(val.rows):,}"

    def _tokenize(self, config: RunConfig) -> str:
        """Makes the prompts; of a resumed run, checks that they are those that it was begun with."""
        from dataflow.data.prompts import load_prompts
        from dataflow.models.tokenizer import tokenizer_sha256
        from dataflow.tools import toolbox_of

        assert self._problems is not None
        schemas = None
        if config.tools.offered:
            tools = toolbox_of(config)
            _ = tools.reader  # calls can be read, and answers be framed
            schemas = tools.schemas
        self._sources = train, held_out = load_prompts(config, *self._problems, schemas)
        found = {"model.path": tokenizer_sha256(str(config.model.path))}
        found["data.train"], found["data.train token ids"] = train.digests()
        if config.val.every:
            found["data.val"], found["data.val token ids"] = held_out.digests(config.data.val_size)
        recorded: Mapping[str, str] = {}
        if self.directory is not None:
            recorded = read_values(self.directory / CONFIG)[ORIGIN].get("data", {})
            check_same(recorded, found, config, self.directory)
        self.digests = {**recorded, **found}
        most = max(source.longest for source in self._sources)
        return f"up to {most:,} tokens (data.max_prompt_length={config.data.max_prompt_length})"

    def _take(self) -> None:
        """Keeps the pipeline's input fields: those of ``inputs(config)``, and the prompts of a run with a model."""
        config, found = self.config, dict[str, Callable[[int], Any]]()
        if isinstance(config, RunConfig):
            assert self._sources is not None
            train, held_out = self._sources
            val = held_out.all(config.data.val_size) if config.val.every else None
            found = {"prompts": Ahead(train.batch), "val_prompts": lambda step: val}
        found |= inputs_of(self.module, config)
        if missing := [name for name in self.graph.pipeline.inputs if name not in found]:
            where = f"pipeline file '{self.module.__file__}'" if self.module.__file__ else "the pipeline"
            raise ConfigError(
                f"{where}: nothing supplies its input '{missing[0]}'; define inputs(config), which returns "
                f"{{'{missing[0]}': a function of the step}}."
            )
        self.inputs = {name: found[name] for name in self.graph.pipeline.inputs}

    # --- settings that would train otherwise than they seem -----------------------------------------------------

    def _remarks(self, config: RunConfig) -> Iterator[str]:
        yield from toy_settings(config)
        yield from without_effect(config, config.given_keys)
        options, model = config.data.apply_chat_template_kwargs, config.model.path or ""
        template = chat_template(Path(model)) if options and Path(model).is_dir() else ""
        for name in options if template else ():
            if not re.search(rf"\b{re.escape(name)}\b", template):  # Jinja takes any name
                yield (
                    f"data.apply_chat_template_kwargs.{name} has no effect: the chat template of model.path={model} "
                    "does not read it; leave it out, or take a model whose template does."
                )
        if config.val.every and config.data.val is None and config.data.train is not None:
            yield (
                "data.val: no file is given, so that evaluations use generated word problems, not problems like those "
                "of data.train; give data.val=FILE, or val.every=0."
            )

    # --- what a start finds out late --------------------------------------------------------------------------

    def _estimate(self) -> None:
        # The hosts are made again, as names of models have become directories.
        self._need = need_of(self.config, pipeline_of(self.module, self.config).hosts())

    def _check_gpu_memory(self) -> str:
        assert self._need is not None
        pools = self._need.pools
        try:
            gpus = gpu_memory()
        except NotChecked as reason:
            sizes = [
                f"{part.name} {gib(part.held + part.works)}" + (" and its KV cache" if part.share else "")
                for parts in pools.values()
                for part in parts
            ]
            raise NotChecked(f"{reason}: {', '.join(sizes)} a GPU by estimate") from None
        least = min(gpus, key=lambda gpu: gpu.total - gpu.used)  # any of the machine's may be one of a pool
        total, found = least.total, []
        for pool, parts in pools.items():
            most = peak(parts, total)
            shown = "; ".join(part.shown(total) for part in parts)
            found.append(f"{pool}: {shown}; at most {gib(most)} of {gib(total)}")
            if most > total - least.used:
                used = f", of which other processes use {gib(least.used)}" if least.used > total / 100 else ""
                raise ConfigError(
                    f"{found[-1]}{used}: too much for GPU {least.gpu}; give more ranks (trainer.world_size), lower "
                    "trainer.micro_batch_size (or give trainer.max_tokens_per_gpu) or engine.gpu_memory, or give "
                    "trainer.param_offload and optimizer_offload, or trainer.lora.rank."
                )
        return "; ".join(found)

    def _check_disk(self, config: RunConfig) -> str:
        checkpoint, free = config.checkpoint, free_disk(Path(config.runs))
        need = self._need or Need({}, 0.0, 0.0)  # of a model whose size is not known
        saved = math.ceil(config.steps / checkpoint.every) if checkpoint.every and need.checkpoint else 0
        often = config.steps // checkpoint.keep_every if checkpoint.keep_every else 0
        # A checkpoint is written before an older one is removed.
        kept = min(saved, checkpoint.keep_last + checkpoint.keep_best + often + 1)
        wanted = max(_LEAST_DISK, kept * need.checkpoint + need.model)
        parts = [f"{counted(kept, 'checkpoint')} of {gib(need.checkpoint)}"] if kept else []
        parts += [f"a model of at most {gib(need.model)}"] if need.model else []
        facts = " and ".join(parts) or "trace, samples and metrics"
        if wanted > free:
            raise ConfigError(
                f"runs={config.runs}: {facts} need {gib(wanted)}, and {gib(free)} are free; make room, give another "
                "place, or lower checkpoint.keep_last."
            )
        return f"{facts}; {gib(free)} are free"


def check_packages(config: BaseConfig) -> str | None:
    """Checks that the packages which a run imports are there, in the versions that training requires; returns these."""
    names = ["ray"] if config.executor == "ray" else []
    trains = isinstance(config, RunConfig)
    names += ["torch", "transformers", "verl"] if trains else []
    for name in names:
        if (why := not_installed(name)) is not None:
            raise ConfigError(why)
    if trains and (why := mismatched("train")) is not None:
        raise ConfigError(why)
    found = []
    for name in (*names, *(each for each in PACKAGES if each.startswith("vllm") and trains)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found) or None


def settle(config: BaseConfig, progress: Progress) -> None:
    """Replaces names of models by their directories, and the engine ``auto`` by one: a repeated run uses the same."""
    if isinstance(config, RunConfig):
        settle_models(config, progress)
        for name in config.trained:
            settle_critic(config, name)


def settle_critic(config: RunConfig, name: str) -> None:
    """Does so with the model that a critic begins with, by the name of its section."""
    section = config.trained[name]
    if isinstance(section, CriticConfig) and section.path is not None:
        section.path = str(check_model(section.path, f"{name}.path"))


def settle_models(config: RunConfig, progress: Progress) -> str:
    """Does so with the actor, and with a teacher, and chooses the engine; returns the actor's directory."""
    from dataflow.models.tiny import RECIPES, tiny_model

    for name in type(config).model_fields:
        model = getattr(config, name)
        if isinstance(model, ModelConfig):
            path = model.path or tiny_model(progress=progress.warm_up, recipe=RECIPES[model.tiny])
            model.path = str(check_model(path, f"{name}.path"))
    if config.engine.rollout == "auto":
        known = circumstances(config)
        config.engine.rollout = rollout_engine("auto", **known)  # type: ignore[assignment]
        why = why_transformers(**known)
        vllm = f"vLLM samples, as it is installed for {'GPUs' if known['device'] == 'cuda' else 'the CPU'}"
        logger.info(f"engine.rollout=auto: {f'transformers samples, as {why}' if why else vllm}")
    return str(config.model.path)


def check_fits(config: RunConfig) -> None:
    """Checks that prompts and responses fit into the model, and that each part of the run can have its images."""
    draw, path = config.engine, config.model.path
    positions = room_of(path or "").positions
    tokens = config.response_length
    # vLLM and servers reserve memory for the longest possible prompt; transformers for each actual one.
    longest = 1 if engine_kind(config) == "hf" else config.data.max_prompt_length
    if positions is not None and longest + tokens > positions:
        key = "tools.max_response_tokens" if config.tools.offered else "engine.max_tokens"
        prompt = f"data.max_prompt_length={longest} and " if longest > 1 else "a prompt and "
        raise ConfigError(
            f"{prompt}{key}={tokens} are together more than the {positions} tokens that model '{path}' can read; lower "
            "one."
        )
    without_images = {
        f"engine.replicas={draw.replicas}": draw.replicas > 1,
        f"engine.tensor_parallel={draw.tensor_parallel}": draw.tensor_parallel > 1 and not config.ray.gpus_per_worker,
        "engine.rollout=http": draw.rollout == "http",
        "tools": config.tools.offered,
        "critic": "critic" in type(config).model_fields,
        "teacher": "teacher" in type(config).model_fields,
    }
    wrong = next((what for what, given in without_images.items() if given), None)
    if wrong is not None and takes_images(path or ""):
        raise ConfigError(f"{wrong}: model '{path}' takes images, which this cannot have yet; leave it out.")


def check_same(recorded: Mapping[str, str], found: Mapping[str, str], config: RunConfig, directory: Path) -> None:
    """Checks that a run is resumed with the data that it was begun with, except for what ``resume.allow`` names.

    ``recorded`` are the digests of its data then, ``found`` those of now.
    """
    for name, digest in found.items():
        key, _, of = name.partition(" ")
        if recorded.get(name, digest) == digest or {"data", key, key.split(".")[0]}.intersection(config.resume.allow):
            continue
        given = config.model.path if key == "model.path" else getattr(config.data, key.partition(".")[2])
        what = "tokenizer, chat template and configuration" if key == "model.path" else of or "rows"
        raise ConfigError(
            f"{key}={'null' if given is None else given}: its {what} are not those that the run '{directory}' was "
            "begun with, and with others it would be another run; put them back, or allow it with resume.allow=[data]."
        )


def toy_settings(config: RunConfig) -> Iterator[str]:
    """Yields a sentence for each setting left at the tiny models' default in a run with a real model."""
    path, given = config.model.path, config.given_keys
    try:
        if path is None or size_of(Path(path)).parameters < _TINY:
            return
    except UserError:
        pass  # a model that is still to be downloaded, or of another form
    for name, section in config.trained.items():
        toy = toy_critic() if isinstance(section, CriticConfig) else toy_trainer()
        if f"{name}.lr" not in given and section.lr == toy.lr:
            usual = type(section).model_fields["lr"].default if section.lora.rank is None else 3e-5
            yield (
                f"{name}.lr={section.lr:g} is the default for the tiny model, and too high for a real one such as "
                f"model.path={path}; give {name}.lr={usual:g} or the like."
            )
    tokens = config.engine.max_tokens
    if "engine.max_tokens" not in given and tokens == EngineConfig.model_fields["max_tokens"].default:
        yield (
            f"engine.max_tokens={tokens} is the default for the tiny model, and cuts off the responses of a real one "
            f"such as model.path={path}; give engine.max_tokens=1024 or the like."
        )
