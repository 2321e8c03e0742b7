"""Preparation: what a run is made of before it starts, its policy, task graph and inputs, with all checks of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from dataflow.config.base import BaseConfig
from dataflow.config.loading.pipeline_file import inputs_of, pipeline_of
from dataflow.config.loading.saved import CONFIG, ORIGIN, read_values
from dataflow.config.reward import JudgeConfig, model_of, rule_of, source_of
from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError, NotChecked, UserError, counted
from dataflow.graph import Hosted, TaskGraph
from dataflow.policy import PolicySchedule, SchedulingPolicy, expand
from dataflow.rewards.managers import scores_alone
from dataflow.rewards.naming import JUDGE, MAIN, SERVED, keyed
from dataflow.running.auto import load_schedule
from dataflow.running.directory import check_directory
from dataflow.running.preparing.check import Check, Checks
from dataflow.running.preparing.prompts import Prompts, check_same, settle_trained
from dataflow.running.preparing.remarks import remarks
from dataflow.running.reporting.progress import Progress
from dataflow.running.reporting.tracking import check_backends
from dataflow.running.services.hosting import (
    CRITIC,
    REWARD,
    TRAINER,
    check_engine,
    check_trained,
    gpus_of,
    reward_host,
)
from dataflow.running.services.nodes import check_nodes
from dataflow.running.services.servers import check_rollout_servers, check_weights_directory


class Preparation:
    """A run before it starts.

    Args:
        config, module, progress, directory: of the run, see :class:`~dataflow.running.session.Session`.
        patience_s: seconds to wait for servers elsewhere; None waits as long as their ``start_timeout``.

    Attributes:
        graph: the run's tasks, once the checks have made it.
        inputs: the pipeline's input fields, a function of the step each, likewise.
        data: hashes of what decides the samples of each step (:meth:`Prompts.digests`), likewise.
    """

    graph: TaskGraph
    inputs: Mapping[str, Callable[[int], Any]]
    data: Mapping[str, str] = {}

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
        self.schedule = self.schedule_of(directory)
        self.right: set[str] = set()
        """Names of the reward agents that were found right."""
        self._progress, self._patience_s = progress, patience_s

    @property
    def hosts(self) -> Mapping[str, Hosted]:
        """The hosts of the run's services, by name; empty before there is a graph."""
        return self.graph.pipeline.hosts() if hasattr(self, "graph") else {}

    @property
    def agents(self) -> dict[str, Hosted]:
        """Those of the run's own reward agents; empty if no stage uses one. Without a graph the main one alone."""
        if not isinstance(self.config, RunConfig):
            return {}
        if not hasattr(self, "graph") and MAIN not in self.config.unread:
            with contextlib.suppress(UserError):  # the problem of the pipeline
                return {MAIN: reward_host(self.config)}
        return {name: host for name, host in self.hosts.items() if host.factory == REWARD}

    @property
    def gpus(self) -> int:
        """The number of GPUs that the services need; without a graph as the configuration alone tells it."""
        if hasattr(self, "graph"):
            from dataflow.running.services.served_models import model_hosts

            return gpus_of([*self.hosts.values(), *model_hosts(self.config).values()])
        return self.config.gpus if self.config.ray.gpus_per_worker else 0

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

    def schedule_of(self, directory: Path | None) -> PolicySchedule:
        """Returns the policies of the steps: those that a run has had so far, if it changes them, and the last one."""
        if directory is None or not self.config.policy.auto:
            return PolicySchedule(((1, self.policy),))
        known = load_schedule(directory, self.config.optimizer_steps) or PolicySchedule(((1, self.policy),))
        if (order := known.changes[0][1].order) != self.policy.order:
            raise ConfigError(
                f"policy.order={self.policy.order}: the run was begun with policy.order={order}, which holds for all "
                "its steps; leave it out."
            )
        return known

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

    def checks(self) -> Checks:
        """Yields all checks that a start makes, in its order. They need no service and write nothing."""
        config = self.config
        yield Check("tracking", lambda: check_backends(config.tracking.backends))
        if self.directory is None:
            yield Check("directory", self._check_directory)
        yield Check("pipeline", self._build)  # before the model is made, so that an invalid policy fails at once
        yield Check("pipeline", lambda: self.graph.pipeline.unread(), ("pipeline",))
        if not isinstance(config, RunConfig):
            yield Check("inputs", lambda: self._take(self._own_inputs()), ("pipeline",))
            return
        # Of a pipeline that cannot be built, the configuration tells most.
        hosts, built = self.hosts, hasattr(self, "graph")
        factories = {host.factory for host in hosts.values()}
        trained = [name for name in config.trained if not built or {"trainer": TRAINER}.get(name, CRITIC) in factories]
        if not built or "rollout" in hosts:
            yield Check("engine", lambda: check_engine(config))
        for name in trained:
            yield Check(name, partial(self._check_trained, name))
        if built or config.reward.models:
            yield Check("reward models", self._check_models, ("pipeline",))
        for name, host in self.agents.items():
            model = model_of(config, source_of(config, name))
            yield Check(name, partial(self._check_agent, name, host), () if model is None else ("reward models",))
        services = hosts if built else {"rollout": None, **dict.fromkeys(self.agents)}
        prompts = Prompts(config, services, self._progress)
        yield from prompts.checks()
        for name in trained:  # with the models that are there now
            yield Check(name, partial(self._check_trained, name), (name, "model"))
        own: dict[str, Callable[[int], Any]] = {}
        yield Check("inputs", lambda: own.update(self._own_inputs(prompts)))
        yield from prompts.made()
        if prompts.tokenized:
            yield Check("data", partial(self._check_data, prompts))
        if prompts.tokenized and built:
            yield Check("inputs", lambda: self._take({**prompts.fields(), **own}), ("inputs",))
        if any(model.given_urls for model in config.reward.models.values()):
            yield Check("model servers", self._check_servers)
        if config.engine.rollout == "http" and (not built or "rollout" in hosts):
            # On other nodes it is the engine that looks: this machine need not have the directory.
            if (directory := config.engine.weights_dir) and "rollout" not in config.ray.nodes:
                yield Check("weights directory", partial(check_weights_directory, directory))
            yield Check("servers", lambda: check_rollout_servers(config, self._patience_s))
        # The last, so that wrong input gives one sentence.
        yield Check("settings", lambda: remarks(config, prompts, self.right))

    def _check_data(self, prompts: Prompts) -> None:
        """Keeps hashes of the data, and checks that those of a resumed run are the same."""
        assert isinstance(self.config, RunConfig)
        self.data = prompts.digests()
        if self.directory is not None:
            recorded = read_values(self.directory / CONFIG)[ORIGIN].get("data", {})
            check_same(recorded, self.data, self.config, self.directory)
            self.data = {**recorded, **self.data}

    def _check_trained(self, name: str) -> None:
        assert isinstance(self.config, RunConfig)
        settle_trained(self.config, name)
        check_trained(self.config, name)

    def _check_directory(self) -> str:
        check_directory(self.config)
        return f"{Path(self.config.runs, self.config.name or '')} can be written"

    def _build(self) -> str:
        pipeline, policy = self.expand().pipeline, self.policy
        if self.config.policy.auto and policy.stream_rollout and not pipeline.streaming:
            raise ConfigError("policy.stream_rollout=true: no stage of this pipeline streams; leave it out.")
        check_nodes(self.config, pipeline.hosts())
        stages = f"{counted(len(pipeline.stages), 'stage')}, {counted(self.config.steps, 'step')}"
        stages += f" under {self.config.policy.preset}"
        if self.config.policy.auto:
            return stages
        parts = counted(policy.split, "part")
        return f"{stages} ({parts}, max_staleness {policy.max_staleness})"

    def _check_models(self) -> str | None:
        assert isinstance(self.config, RunConfig)
        from dataflow.running.services.served_models import check_models
        from dataflow.stages.normalize import normalizes

        pipeline, agents = self.graph.pipeline, self.agents
        check_models(self.config, agents)
        for name in agents:
            rule = rule_of(self.config, source_of(self.config, name))
            if rule == "running" and not normalizes(pipeline.stages, name):
                raise ConfigError(
                    f"reward agent '{name}': this pipeline does not normalise its scores (normalize=running); make "
                    "it with recipe_pipeline, or give the model normalize=none."
                )
        return ", ".join(self.config.reward.models) or None

    def _check_agent(self, name: str, host: Hosted) -> str:
        from dataflow.distribution import parse_distribution
        from dataflow.running.services.agent import check_reward

        collector = self.graph.pipeline.collector if hasattr(self, "graph") else None
        first = collector.host if collector is not None else None
        limits = check_reward(**host.options)
        if host.options["options"].extra_groups and first is not None and name != first.name:
            raise ConfigError(
                f"{name}.on_failure=replace_group: the groups of a part are those of agent '{first.name}', so that "
                f"no other can take the place of a failed one; give {name}.on_failure=drop_group."
            )
        if (stand_in := self.stand_ins.get(name)) is not None:
            parse_distribution(stand_in.latency, keyed("judge.latency", name))
        self.right.add(name)
        custom, options = source_of(self.config, name).custom, host.options["options"]
        target = host.options["default"]["target"]
        changed = [key for key, value in JudgeConfig() if getattr(source_of(self.config, name).judge, key) != value]
        if target not in (JUDGE, SERVED) and custom.path is None and changed:
            raise ConfigError(
                f"{name}.judge.{changed[0]} has no effect: the pipeline has {target} score for agent '{name}'; leave "
                "it out, or take default= out of its reward_host."
            )
        judge = "a stand-in for the judge" if name in self.stand_ins else "the judge"
        scorer = custom.name if custom.path else judge if name in self.judges else target
        if scores_alone(options.manager, options.manager_path):
            scorer = f"{name}.manager={options.manager}"
        return f"{scorer}, {counted(limits.concurrency, 'request')} in flight"

    def _own_inputs(self, prompts: Prompts | None = None) -> Mapping[str, Callable[[int], Any]]:
        """Returns the fields of the pipeline file's ``inputs``, which may read the run's models.

        Raises:
            ConfigError: nothing supplies an input of the pipeline.
        """
        if prompts is not None and not prompts.settled and hasattr(self.module, "inputs"):
            raise NotChecked("inputs(config) may need the model, which is not there")
        own, file = inputs_of(self.module, self.config), self.module.__file__ or ""
        found = {*own, *(prompts.FIELDS if prompts else ())}
        if missing := [
            name for name in (self.graph.pipeline.inputs if hasattr(self, "graph") else ()) if name not in found
        ]:
            where = f"pipeline file '{file}'" if file else "the pipeline"
            raise ConfigError(
                f"{where}: nothing supplies its input '{missing[0]}'; define inputs(config), which returns "
                f"{{'{missing[0]}': a function of the step}}."
            )
        return own

    def _take(self, found: Mapping[str, Callable[[int], Any]]) -> None:
        """Keeps the pipeline's input fields: those of ``inputs(config)``, and the prompts of a run with a model."""
        self.inputs = {name: found[name] for name in self.graph.pipeline.inputs}

    def _check_servers(self) -> str:
        assert isinstance(self.config, RunConfig)
        from dataflow.rewards.models.probe import check_servers

        wanted = [
            (name, url, model.start_timeout if self._patience_s is None else self._patience_s)
            for name, model in self.config.reward.models.items()
            for url in model.given_urls
        ]
        check_servers(wanted)
        return f"{len(wanted)} answer"
