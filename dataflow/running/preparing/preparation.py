"""What a run is made of before it starts: its policy, task graph and inputs; and the list of its checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from dataflow.config.base import BaseConfig
from dataflow.config.loading.pipeline_file import inputs_of, pipeline_of
from dataflow.config.loading.saved import CONFIG, ORIGIN, read_values
from dataflow.config.reward import JudgeConfig, model_of, source_of, sources_of
from dataflow.config.run import RunConfig
from dataflow.engines.choice import rollout_engine
from dataflow.errors import ConfigError, NotChecked, counted
from dataflow.graph import Hosted, TaskGraph
from dataflow.models.directory import check_weights
from dataflow.planning.auto import opening
from dataflow.policy import PolicySchedule, SchedulingPolicy, expand
from dataflow.rewards.managers import scores_alone
from dataflow.rewards.naming import JUDGE, MAIN, keyed
from dataflow.running.directory import check_directory
from dataflow.running.preparing.check import Check
from dataflow.running.preparing.data import Data, check_same, check_truths
from dataflow.running.preparing.models import check_fits, settle_models, settle_trained
from dataflow.running.preparing.remarks import remarks
from dataflow.running.replanning import load_schedule, policies_of
from dataflow.running.reporting.progress import Progress
from dataflow.running.reporting.tracking import check_backends
from dataflow.running.services.hosting import REWARD, circumstances, gpus_of
from dataflow.running.services.nodes import check_nodes
from dataflow.running.services.training import check_trained

_STAND_IN = ("latency", "time_scale")
"""Keys of the judge's stand-in, which recipes and scripts set for whatever scores."""


class Preparation:
    """A run before it starts.

    Args:
        config, module, progress, directory: of the run, see :class:`~dataflow.running.session.Session`.
        patience_s: seconds to wait for servers elsewhere; None waits as long as their ``start_timeout``.

    Attributes:
        graph: the run's tasks, once the checks have made it.
        schedule: the policies of the steps: those that a run has had so far, if it changes them, and the last one.
        inputs: the pipeline's input fields, a function of the step each, likewise.
        digests: hashes of what decides the samples of each step (:meth:`Data.digests`), likewise.
        data: the prompts of a run with a language model.
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
        self.data = Data()
        self._progress, self._patience_s = progress, patience_s

    @property
    def hosts(self) -> Mapping[str, Hosted]:
        """The hosts of the run's services, by name; empty before there is a graph."""
        return self.graph.pipeline.hosts() if hasattr(self, "graph") else {}

    @property
    def agents(self) -> dict[str, Hosted]:
        """Those of the run's own reward agents; empty if no stage uses one."""
        return {name: host for name, host in self.hosts.items() if host.factory == REWARD}

    @property
    def gpus(self) -> int:
        """The number of GPUs that the services need."""
        from dataflow.running.services.served_models import model_hosts

        return gpus_of([*self.hosts.values(), *model_hosts(self.config).values()])

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
        """The judges that the run has to start, as they have no address."""
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

    def checks(self) -> list[Check]:
        """Returns the checks that a start makes, in its order; they need no service and write nothing."""
        config = self.config
        general = [
            Check("tracking", lambda: check_backends(config.tracking.backends)),
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
            *(Check(s.name, partial(self._check_agent, s.name), self._of_agent(s)) for s in sources_of(config)),
            Check("data", lambda: self.data.read(config)),
            Check("references", lambda: self._check_references(config), ("data", "pipeline")),
            Check("model", lambda: settle_models(config, self._progress)),
            Check("lengths", lambda: check_fits(config), ("model",)),
            *(Check(name, partial(self._check_trained, config, name)) for name in config.trained),
            Check("prompts", lambda: self._tokenize(config), ("data", "model")),
            Check("weights", lambda: check_weights(Path(config.model.path or "")), ("model",)),
            Check("inputs", self._take, ("pipeline", "prompts")),
            Check("model servers", lambda: self._check_model_servers(config)),
            Check("servers", lambda: self._check_servers(config)),
            Check("settings", lambda: remarks(config, self.data.problems, self.data.toolbox)),
        ]

    def _of_agent(self, source: Any) -> tuple[str, ...]:
        return ("pipeline",) if model_of(self.config, source) is None else ("pipeline", "reward models")

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
        parts = counted(policy.split, "part")
        return f"{stages} ({parts}, max_staleness {policy.max_staleness})"

    def _hosts(self, name: str) -> bool:
        """Whether the run has a service of that name, as far as is known before there is a graph."""
        return not hasattr(self, "graph") or name in self.hosts

    def _check_engine(self, config: RunConfig) -> str | None:
        return rollout_engine(config.engine.rollout, **circumstances(config)) if self._hosts("rollout") else None

    def _check_trained(self, config: RunConfig, name: str) -> None:
        if self._hosts(name):
            settle_trained(config, name)
            check_trained(config, name)

    def _check_models(self, config: RunConfig) -> str | None:
        from dataflow.running.services.served_models import check_models

        check_models(config, self.agents)
        return ", ".join(config.reward.models) or None

    def _check_agent(self, name: str) -> str | None:
        from dataflow.distribution import parse_distribution
        from dataflow.running.services.agent import check_reward

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
        source = source_of(self.config, name)
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

    def _check_references(self, config: RunConfig) -> None:
        assert self.data.problems is not None
        if MAIN in self.agents:
            check_truths(config, *self.data.problems)

    def _tokenize(self, config: RunConfig) -> str:
        """Makes the prompts; of a resumed run, checks that they are those that it was begun with."""
        found = self.data.tokenize(config)
        self.digests = self.data.digests(config)
        if self.directory is not None:
            recorded = read_values(self.directory / CONFIG)[ORIGIN].get("data", {})
            check_same(recorded, self.digests, config, self.directory)
            self.digests = {**recorded, **self.digests}
        return found

    def _take(self) -> None:
        """Keeps the pipeline's input fields: those of ``inputs(config)``, and the prompts of a run with a model.

        Raises:
            ConfigError: nothing supplies an input of the pipeline.
        """
        config = self.config
        own = inputs_of(self.module, config)
        found = {**self.data.fields(config), **own} if isinstance(config, RunConfig) else own
        if missing := [name for name in self.graph.pipeline.inputs if name not in found]:
            where = f"pipeline file '{self.module.__file__}'" if self.module.__file__ else "the pipeline"
            raise ConfigError(
                f"{where}: nothing supplies its input '{missing[0]}'; define inputs(config), which returns "
                f"{{'{missing[0]}': a function of the step}}."
            )
        self.inputs = {name: found[name] for name in self.graph.pipeline.inputs}

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

    def _check_servers(self, config: RunConfig) -> str | None:
        """Waits for the inference servers of ``engine.rollout=http``, and checks that they serve the run's model."""
        if config.engine.rollout != "http" or not self._hosts("rollout"):
            return None
        from dataflow.engines.http.engine import check_servers
        from dataflow.files import unmakable

        draw, model = config.engine, config.model.path
        # On other nodes it is the engine that looks: this machine need not have the directory.
        if draw.weights_dir and "rollout" not in config.ray.nodes and (why := unmakable(draw.weights_dir)) is not None:
            raise ConfigError(f"engine.weights_dir={draw.weights_dir}: {why}")
        here = model is not None and Path(model, "config.json").is_file()
        longest = config.data.max_prompt_length + config.response_length
        wait_s = draw.server_wait if self._patience_s is None else self._patience_s
        found = check_servers(draw.urls, draw.api_key_env, model if here else None, longest, wait_s)
        if not here:
            raise NotChecked(
                f"they answer ({found}); what they serve is compared with the model of model.path, which is not there "
                "yet"
            )
        return found
