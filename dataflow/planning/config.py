"""The configuration of a plan: values that the source does not contain, and knobs to vary."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dataflow.config.base import PolicyConfig
from dataflow.config.placement import Placement
from dataflow.config.section import Section
from dataflow.distribution import parse_distribution
from dataflow.errors import ConfigError, nearest
from dataflow.planning.workload import Modelled, Rewards

DurationText = Annotated[str, Field(min_length=1, coerce_numbers_to_str=True)]

MOST_IN_FLIGHT = 100_000
"""A plan keeps the time of each slot; more slots than a few steps have requests change nothing."""


class AgentPlan(Section):
    """The service of a reward agent."""

    latency: DurationText | None = None
    """Seconds of one request: a number, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, empirical:FILE; null: measured."""
    concurrency: Annotated[PositiveInt, Field(le=MOST_IN_FLIGHT)] | None = None
    """Requests in flight at most, up to 100,000; null: the source's."""
    rpm: PositiveFloat | None = None
    """Requests a minute at most; null: the source's limit, if it had one."""
    agent: Literal["continuous", "per-step"] = "continuous"
    """continuous keeps every slot busy; per-step finishes one step's requests before it begins the next."""

    def change(self, rewards: Rewards, key: str) -> Rewards:
        """Returns a source's reward service with what the keys of this section, ``key``, change."""
        if self.latency is not None:
            rewards = replace(rewards, latency=parse_distribution(self.latency, f"{key}.latency"), steps={})
        concurrency, rpm = self.concurrency or rewards.concurrency, self.rpm or rewards.rpm
        return replace(rewards, concurrency=concurrency, rpm=rpm, agent=self.agent)


class LogPlan(Section):
    """What the run of a verl log had, and its log does not say; every other key says what to plan."""

    concurrency: Annotated[PositiveInt, Field(le=MOST_IN_FLIGHT)] | None = None
    """Reward requests that it had in flight at most."""
    latency: DurationText | None = None
    """How its requests' seconds were spread, as for reward.latency; scaled to its waits where these show them."""
    rpm: PositiveFloat | None = None
    """Requests a minute at most that its service allowed; null for no limit."""


class ValidationPlan(Section):
    """Validation."""

    every: NonNegativeInt | None = None
    """Steps from one to the next; 0 for none; null takes the source's."""
    samples: NonNegativeInt | None = None
    """Reward requests of one validation; null takes the source's."""
    pool: Literal["shared", "own"] = "shared"
    """Scored after the training requests, or by separate servers."""
    overlap: bool | None = None
    """Training continues during validation; null: yes, except for a verl log with reward.agent=per-step."""


class CheckpointPlan(Section):
    """Checkpoints."""

    every: NonNegativeInt | None = None
    """Steps from one to the next; 0 for none; null takes the source's."""


class PlanConfig(Section):
    """All keys of a plan, for the command line or a costs.yaml."""

    steps: Annotated[int, Field(gt=0, le=100_000)] | None = None
    """Training steps; null takes the source's."""
    prompts: PositiveInt | None = None
    """Prompt groups a step."""
    responses: PositiveInt | None = None
    """Responses to a prompt."""
    mini_batches: PositiveInt | None = None
    """Optimizer steps a step."""
    seed: NonNegativeInt = 0
    """Seed of all random draws."""
    dispatch: NonNegativeFloat | None = None
    """Seconds from when a task is ready until its worker begins; null: measured, or 0."""
    balance_batch: bool | None = None
    """Spread each group's requests over the batch, as verl does when it balances a batch by length over its ranks."""
    stages: dict[str, DurationText] = Field(default_factory=dict)
    """Seconds of a stage in a step, in place of the source's: a number or a distribution, as for reward.latency."""
    placement: Placement | None = None
    """Engine and trainer on the same GPUs (colocated) or on separate ones (disaggregated); null: as in the source."""
    policy: PolicyConfig | None = None
    """An additional policy to predict."""
    reward: AgentPlan = Field(default_factory=AgentPlan)
    agents: dict[str, AgentPlan] = Field(default_factory=dict)
    """Further reward agents, by name, each with the keys of reward: {style: {concurrency: 16}}."""
    validation: ValidationPlan = Field(default_factory=ValidationPlan)
    checkpoint: CheckpointPlan = Field(default_factory=CheckpointPlan)
    log: LogPlan = Field(default_factory=LogPlan)

    def times(self, stages: Collection[str], folder: Path | None = None) -> dict[str, Modelled]:
        """Returns the time of each stage that a key gives; ``folder`` has the files that it names."""
        for name in self.stages:
            if name not in stages:
                guess = nearest(name, stages) or f"; stages: {', '.join(stages)}."
                raise ConfigError(f"stages.{name}: no stage that takes time of its own has that name{guess}")
        given = self.stages.items()
        return {name: Modelled(parse_distribution(text, f"stages.{name}", folder)) for name, text in given}

    def refuse_log(self, source: str, why: str) -> None:
        """Rejects what a log ran with where the source is none, or says it."""
        if given := sorted(self.log.model_fields_set):
            raise ConfigError(f"log.{given[0]}: {source} {why}; reward.{given[0]} says what to plan.")

    def need(self, where: object, examples: Mapping[str, object], known: str = "", why: str = "") -> list[Any]:
        """Returns the values of keys that the source ``where`` does not contain; the error names all missing ones.

        ``examples`` has a value that each key may have. For the message, ``known`` is what the source says about the
        keys, and ``why`` a sentence on why they are needed.
        """
        values = {key: _value(self, key) for key in examples}
        if missing := [key for key, value in values.items() if value is None]:
            given = " ".join(f"{key}={examples[key]}" for key in missing)
            *first, last = missing
            names = f"'{last}'" if not first else f"{', '.join(first)} and {last}"
            raise ConfigError(
                f"{why}{where} does not say {names}; give {given} or what {'they are' if first else 'it is'}{known}."
            )
        return list(values.values())


def _value(config: object, key: str) -> object:
    """Returns the value of a dotted key; None if it was not given."""
    for name in key.split("."):
        config = config.get(name) if isinstance(config, Mapping) else getattr(config, name)
    return config
