"""What-ifs: what the keys of a plan change in its source, the same for every kind of source. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from dataflow.distribution import Distribution, parse_distribution
from dataflow.errors import ConfigError, nearest
from dataflow.planning.config import AgentPlan, PlanConfig
from dataflow.planning.rewards import Rewards
from dataflow.planning.workload import Modelled


def changed(rewards: Rewards, plan: AgentPlan, key: str) -> Rewards:
    """Returns a source's reward service with what the keys of its agent (section ``key``) change."""
    if plan.latency is not None:
        rewards = replace(rewards, latency=parse_distribution(plan.latency, f"{key}.latency"), steps={})
    concurrency, rpm = plan.concurrency or rewards.concurrency, plan.rpm or rewards.rpm
    return replace(rewards, concurrency=concurrency, rpm=rpm, agent=plan.agent)


def given_times(
    config: PlanConfig, stages: Collection[str], parse: Callable[[str, str], Distribution] = parse_distribution
) -> dict[str, Modelled]:
    """Returns the time of each stage that a key gives.

    Raises:
        ConfigError: there is no such stage, or a time is none.
    """
    for name in config.stages:
        if name not in stages:
            guess = nearest(name, stages) or f"; stages: {', '.join(stages)}."
            raise ConfigError(f"stages.{name}: no stage that takes time of its own has that name{guess}")
    return {name: Modelled(parse(text, f"stages.{name}")) for name, text in config.stages.items()}


def refuse_log(config: PlanConfig, source: str, why: str) -> None:
    """Rejects what a log ran with where the source is none, or says it.

    Raises:
        ConfigError: it was given.
    """
    if given := sorted(config.log.model_fields_set):
        raise ConfigError(f"log.{given[0]}: {source} {why}; reward.{given[0]} says what to plan.")
