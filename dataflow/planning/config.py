"""The configuration of a plan: values that the source does not contain, and knobs to vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from dataflow.config.base import PolicyConfig
from dataflow.config.keys import verl_keys
from dataflow.config.placement import Placement
from dataflow.config.section import Section
from dataflow.errors import ConfigError

DurationText = Annotated[str, Field(min_length=1, coerce_numbers_to_str=True)]

LARGEST_STEP = 2**24
"""Samples of a step at most: a plan keeps the times of each."""
MOST_IN_FLIGHT = 100_000
"""A plan keeps the time of each slot; more slots than a few steps have requests change nothing."""

_OF_A_RUN = {
    "data.prompts": "prompts",
    "engine.n": "responses",
    "trainer.mini_batches": "mini_batches",
    "trainer.balance_batch": "balance_batch",
    "val.every": "validation.every",
    "checkpoint.every": "checkpoint.every",
    "steps": "steps",
    "seed": "seed",
}
"""A run's key -> the plan's."""
_MORE = {"mini_batches": ": data.train_batch_size / ppo_mini_batch_size"}


def _elsewhere(key: str, exactly: bool = False) -> str | None:
    """Returns the name here of a key of verl or of a run, as part of a message; None for any other key.

    >>> _elsewhere("rollout.n")
    "verl's 'actor_rollout_ref.rollout.n' is 'responses' in a plan."
    >>> _elsewhere("engine.n")
    "'engine.n' of a run is 'responses' in a plan."
    >>> _elsewhere("reward.latency") is None
    True
    """
    key = key.lstrip("+~")  # Hydra's marks of keys to add or remove
    if key in _OF_A_RUN:
        return f"'{key}' of a run is '{_OF_A_RUN[key]}' in a plan."
    if key in verl_keys.COMMON and (ours := _OF_A_RUN.get(verl_keys.COMMON[key][0])) is not None:
        return f"'{key}' is '{ours}' in a plan."
    for section in ("", "actor_rollout_ref.", "actor_rollout_ref.actor.", "data.", "trainer."):
        found = verl_keys.find(name := section + key)
        if found is not None and found[0] == name and (ours := _OF_A_RUN.get(found[1].ours or "")) is not None:
            return f"verl's '{name}' is '{ours}' in a plan{_MORE.get(ours, '')}."
    return None


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

    elsewhere: ClassVar[Callable[..., str | None]] = staticmethod(_elsewhere)
    """Returns a message with the equivalent of a key of verl or of a run."""

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

    @model_validator(mode="after")
    def _a_step_fits_into_memory(self) -> PlanConfig:
        prompts, responses = self.prompts or 1, self.responses or 1
        if prompts * responses > LARGEST_STEP:
            raise ConfigError(
                f"prompts={prompts} x responses={responses} are more than the {LARGEST_STEP} samples that a step may "
                "have; lower one."
            )
        return self

    def need(self, where: object, examples: Mapping[str, object], known: str = "", why: str = "") -> list[Any]:
        """Returns the values of keys that the source does not contain.

        Args:
            where: the source.
            examples: key -> a value that it may have.
            known: what the source says about the keys, for the message.
            why: a sentence on why they are needed, for the message.

        Raises:
            ConfigError: keys were not given; it names all of them.
        """
        values = {key: _value(self, key) for key in examples}
        missing = [key for key, value in values.items() if value is None]
        if missing:
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
