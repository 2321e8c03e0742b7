"""Costs written by hand, in YAML: the keys of PlanConfig, with the seconds of each stage. See examples/costs.yaml."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dataflow.config.keys import yaml_values
from dataflow.distribution import Distribution, parse_distribution
from dataflow.errors import ConfigError, DataError
from dataflow.files import decoded
from dataflow.graph import Pipeline
from dataflow.planning.config import PlanConfig
from dataflow.planning.rewards import Rewards, Validation
from dataflow.planning.sources.whatifs import given_times, refuse_log
from dataflow.planning.workload import (
    CRITIC,
    STAGES,
    Workload,
    advantage,
    grpo,
    reward_collect,
    reward_request,
)
from dataflow.policy import check_batch

TIMED = [s.name for s in STAGES if s.on != "reward"]
NEEDED = [s.name for s in STAGES if s.role in ("samples", "trains") and s.name not in CRITIC]
RENAMED = {"save_checkpoint": "checkpoint"}


def values(path: Path) -> Mapping[str, Any]:
    """Returns the values in the file.

    Raises:
        DataError: the file is not a YAML mapping.
    """
    try:
        loaded = yaml_values.load(decoded(path.read_bytes()))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise DataError(f"costs {path} cannot be read as YAML: {why}; see examples/costs.yaml.") from error
    if not isinstance(loaded, dict) or not loaded:
        raise DataError(f"costs {path} holds no 'key: value' lines; see examples/costs.yaml.")
    return loaded


def distribution_of(text: str, what: str, path: Path) -> Distribution:
    """Returns a distribution; its file is looked up beside the costs, then in the current directory."""
    name = text.partition(":")[2]
    beside = text.startswith("empirical:") and (path.parent / name).is_file()
    return parse_distribution(text, what, path.parent if beside else None)


def workload(path: Path, config: PlanConfig) -> Workload:
    """Returns the workload of the file and the command line.

    Raises:
        ConfigError: something is missing or wrong.
    """
    refuse_log(config, str(path), "is no log")
    for name in config.stages:
        if name in RENAMED:
            raise ConfigError(f"stages.{name} is now stages.{RENAMED[name]}; rename the key.")
    critic = any(name in config.stages for name in CRITIC)
    needed = dict.fromkeys((f"stages.{name}" for name in ([*NEEDED, *CRITIC] if critic else NEEDED)), "SECONDS")
    keys = {"steps": 100, "prompts": 1024, "responses": 5, "mini_batches": 4, "reward.concurrency": 256}
    steps, prompts, responses, mini_batches, concurrency, *_ = config.need(
        path, {**keys, **needed, "reward.latency": "uniform:1:40"}
    )
    check_batch(prompts, mini_batches)
    every = config.validation.every
    validation = None
    if every:
        overlap = config.validation.overlap is not False
        validation = Validation(every, config.validation.samples or 0, config.validation.pool, overlap)
    checkpoints = config.checkpoint.every or None
    reference = "ref_log_prob" in config.stages
    bypass = "old_log_prob" not in config.stages
    stops = config.validation.overlap is False
    pipeline = grpo(reference, validation, checkpoints, critic=critic, bypass=bypass, stops=stops)
    if config.agents and validation is not None and not validation.overlap:
        raise ConfigError("agents: with validation.overlap=false a plan has one reward agent; leave one of them out.")
    pipeline, beside = _with_agents(pipeline, config, path)
    given = given_times(config, TIMED, parse=lambda text, what: distribution_of(text, what, path))
    times = {name: time for name, time in given.items() if name in pipeline.by_name}
    assumed = [
        f"stages.{name} is not used: {'validation' if name == 'val_rollout' else 'checkpoint'}.every is not given."
        for name in config.stages
        if name not in pipeline.by_name
    ]
    return Workload(
        source=str(path),
        pipeline=pipeline,
        steps=steps,
        prompts=prompts,
        responses=responses,
        mini_batches=mini_batches,
        times=times,
        rewards=Rewards(
            distribution_of(str(config.reward.latency), "reward.latency", path),
            concurrency,
            config.reward.rpm,
            config.reward.agent,
            bool(config.balance_batch),
        ),
        validation=validation,
        beside=beside,
        dispatch_s=dict.fromkeys(pipeline.by_name, config.dispatch or 0.0),
        assumptions=tuple(assumed),
        seed=config.seed,
    )


def _with_agents(pipeline: Pipeline, config: PlanConfig, path: Path) -> tuple[Pipeline, dict[str, Rewards]]:
    """Returns the pipeline with a further reward agent for each of ``config.agents``, and their services.

    Each scores all responses, and the advantages wait for all agents.

    Raises:
        ConfigError: an agent has a name that is taken, or no latency.
    """
    stages, resources, beside = list(pipeline.stages), dict(pipeline.resources), {}
    for name, plan in config.agents.items():
        if name in resources or not name.isidentifier():
            raise ConfigError(f"agents.{name}: give a name like those of Python, other than {', '.join(resources)}.")
        if plan.latency is None:
            raise ConfigError(f"{path} does not say 'agents.{name}.latency'; give seconds or a distribution.")
        if plan.concurrency is None:
            raise ConfigError(f"{path} does not say 'agents.{name}.concurrency'; give the requests in flight at most.")
        renamed = {"reward_ticket": f"{name}_ticket", "rewards": f"{name}_rewards"}
        collect = reward_collect.bind(name=f"{name}_collect", on=name, renamed=renamed)
        stages += [reward_request.bind(name=f"{name}_request", renamed=renamed), collect]
        stages = [s.also_reads(renamed["rewards"]) if s.name == advantage.name else s for s in stages]
        resources[name] = None
        latency = distribution_of(plan.latency, f"agents.{name}.latency", path)
        beside[collect.name] = Rewards(latency, plan.concurrency, plan.rpm, plan.agent, bool(config.balance_batch))
    return Pipeline(stages, pipeline.inputs, resources), beside
