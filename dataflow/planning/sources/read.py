"""Reads the source of a plan: a dataflow run, a verl log, or costs written by hand (see examples/costs.yaml)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.config.keys import yaml_values
from dataflow.config.keys.overrides import parse_overrides
from dataflow.distribution import parse_distribution
from dataflow.errors import ConfigError, DataError
from dataflow.files import decoded
from dataflow.graph import Pipeline
from dataflow.planning.config import AgentPlan, PlanConfig
from dataflow.planning.sources import logs, trace, verl
from dataflow.planning.workload import (
    CRITIC,
    STAGES,
    TIMED,
    Rewards,
    Validation,
    Workload,
    advantage,
    grpo,
    reward_collect,
    reward_request,
)
from dataflow.policy import check_batch

KINDS = "a run's directory, a verl log (console, jsonl, CSV or TensorBoard) or a costs.yaml"
_NEEDED = [s.name for s in STAGES if s.role in ("samples", "trains") and s.name not in CRITIC]


def read_workload(source: str, overrides: Sequence[str] = ()) -> tuple[Workload, PlanConfig]:
    """Reads a workload and the plan's configuration.

    The source is a run's directory or trace.json, a verl log or a .yaml file, see :data:`KINDS`; the overrides are
    ``key=value``, see :class:`~dataflow.planning.config.PlanConfig`.
    """
    path = Path(source)
    if not (path.is_file() or path.is_dir()):  # opening a FIFO would block until something writes to it
        raise DataError(f"nothing to plan from at '{source}'; give {KINDS}.")
    costs = path.suffix in (".yaml", ".yml")
    config = parse_overrides(PlanConfig, overrides, base=_values(path) if costs else None)
    if costs:
        workload = _by_hand(path, config)
    elif path.suffix == ".json" or (path / "trace.json").is_file():
        workload = trace.workload(path, config)
    elif logs.reader_of(path) is not None:
        workload = verl.workload(path, config)
    else:
        raise DataError(f"'{source}' cannot be planned from; give {KINDS}.")
    return (workload if config.placement is None else workload.placed(config.placement)), config


# --- costs by hand ----------------------------------------------------------------------------------------------------


def _values(path: Path) -> Mapping[str, Any]:
    try:
        loaded = yaml_values.load(decoded(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise DataError(f"costs {path} cannot be read as YAML: {error}; see examples/costs.yaml.") from error
    if not isinstance(loaded, dict) or not loaded:
        raise DataError(f"costs {path} holds no 'key: value' lines; see examples/costs.yaml.")
    return loaded


def _by_hand(path: Path, config: PlanConfig) -> Workload:
    """Returns the workload of a file of costs and the command line."""
    config.refuse_log(str(path), "is no log")
    critic = any(name in config.stages for name in CRITIC)
    asked: dict[str, object] = {
        "steps": 100, "prompts": 1024, "responses": 5, "mini_batches": 4, "reward.concurrency": 256,
    }  # fmt: skip
    asked |= dict.fromkeys((f"stages.{name}" for name in (*_NEEDED, *(CRITIC if critic else ()))), "SECONDS")
    steps, prompts, responses, mini_batches, *_ = config.need(path, {**asked, "reward.latency": "uniform:1:40"})
    check_batch(prompts, mini_batches)
    plan = config.validation
    overlap = plan.overlap is not False
    validation = Validation(plan.every, plan.samples or 0, plan.pool, overlap) if plan.every else None
    if config.agents and not overlap:
        raise ConfigError("agents: with validation.overlap=false a plan has one reward agent; leave one of them out.")
    pipeline = grpo(
        "ref_log_prob" in config.stages,
        validation,
        config.checkpoint.every or None,
        critic=critic,
        bypass="old_log_prob" not in config.stages,
        stops=not overlap,
    )

    def service(plan: AgentPlan, key: str) -> Rewards:
        latency = parse_distribution(str(plan.latency), f"{key}.latency", path.parent)
        return Rewards(latency, plan.concurrency or 1, plan.rpm, plan.agent, bool(config.balance_batch))

    beside = {}
    for name, agent in config.agents.items():
        config.need(path, {f"agents.{name}.latency": "uniform:1:40", f"agents.{name}.concurrency": 64})
        pipeline, collect = _with_agent(pipeline, name)
        beside[collect] = service(agent, f"agents.{name}")
    given = config.times(TIMED, path.parent)
    every = {"val_rollout": "validation", "checkpoint": "checkpoint"}
    unused = [name for name in config.stages if name not in pipeline.by_name]
    return Workload(
        source=str(path),
        pipeline=pipeline,
        steps=steps,
        prompts=prompts,
        responses=responses,
        mini_batches=mini_batches,
        times={name: time for name, time in given.items() if name in pipeline.by_name},
        rewards=service(config.reward, "reward"),
        validation=validation,
        beside=beside,
        dispatch_s=dict.fromkeys(pipeline.by_name, config.dispatch or 0.0),
        assumptions=tuple(f"stages.{name} is not used: {every[name]}.every is not given." for name in unused),
        seed=config.seed,
    )


def _with_agent(pipeline: Pipeline, name: str) -> tuple[Pipeline, str]:
    """Returns the pipeline with a further reward agent, and the name of the stage that collects its rewards.

    It scores all responses, and the advantages wait for all agents.
    """
    if name in pipeline.resources or not name.isidentifier():
        raise ConfigError(
            f"agents.{name}: give a name like those of Python, other than {', '.join(pipeline.resources)}."
        )
    renamed = {"reward_ticket": f"{name}_ticket", "rewards": f"{name}_rewards"}
    collect = reward_collect.bind(name=f"{name}_collect", on=name, renamed=renamed)
    stages = [s.also_reads(renamed["rewards"]) if s.name == advantage.name else s for s in pipeline.stages]
    stages += [reward_request.bind(name=f"{name}_request", renamed=renamed), collect]
    return Pipeline(stages, pipeline.inputs, {**pipeline.resources, name: None}), collect.name
