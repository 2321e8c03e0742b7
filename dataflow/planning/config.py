"""What a plan can be told: what the source does not hold, and the knobs to turn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dataflow.config.placement import Placement
from dataflow.config.run import PolicyConfig, Section
from dataflow.errors import ConfigError

LawText = Annotated[str, Field(min_length=1, coerce_numbers_to_str=True)]


class RewardPlan(Section):
    """The reward service."""

    latency: LawText | None = None
    """Seconds of one request: a number, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA, empirical:FILE; null is measured."""
    concurrency: PositiveInt | None = None
    """Requests in flight at most."""
    rpm: PositiveFloat | None = None
    """Requests a minute at most; null for no limit."""
    agent: Literal["continuous", "per-step"] = "continuous"
    """continuous keeps every slot busy; per-step serves one step's requests after another's."""
    fit: bool = True
    """Stretch the latency to the waits that a baseline's log holds."""


class ValidationPlan(Section):
    """Validation."""

    every: NonNegativeInt | None = None
    """Steps from one to the next; 0 for none; null takes the source's."""
    samples: NonNegativeInt | None = None
    """Reward requests of one validation; null takes the source's."""
    pool: Literal["shared", "own"] = "shared"
    """Scored behind the training requests, or by servers of its own."""
    overlap: bool | None = None
    """Training goes on meanwhile; null: yes, except for a verl log under reward.agent=per-step."""


class CheckpointPlan(Section):
    """Checkpoints."""

    every: NonNegativeInt | None = None
    """Steps from one to the next; 0 for none; null takes the source's."""


class PlanConfig(Section):
    """Everything a plan can be told on the command line, or in a costs.yaml."""

    steps: PositiveInt | None = None
    """Training steps; null takes the source's."""
    prompts: PositiveInt | None = None
    """Prompt groups a step."""
    responses: PositiveInt | None = None
    """Responses to a prompt."""
    mini_batches: PositiveInt | None = None
    """Optimizer steps a step."""
    seed: NonNegativeInt = 0
    """Seed of what is drawn."""
    dispatch: NonNegativeFloat | None = None
    """Seconds from a task's being ready until its worker begins; null is measured, or 0."""
    balance_batch: bool | None = None
    """verl deals a batch over its ranks by length before it is scored, so that a group's requests are spread."""
    stages: dict[str, LawText] = Field(default_factory=dict)
    """Seconds of each stage in a step: a number or a distribution, as for reward.latency."""
    placement: Placement | None = None
    """Engine and trainer on the same GPUs (colocated), or on GPUs of their own (disaggregated); null as the source."""
    policy: PolicyConfig | None = None
    """One more policy to predict."""
    reward: RewardPlan = Field(default_factory=RewardPlan)
    validation: ValidationPlan = Field(default_factory=ValidationPlan)
    checkpoint: CheckpointPlan = Field(default_factory=CheckpointPlan)

    def need(self, key: str, where: object, example: int) -> int:
        """Returns the number of a key that the source does not hold.

        Raises:
            ConfigError: it was not given.
        """
        value: object = self
        for name in key.split("."):
            value = getattr(value, name)
        if value is None:
            raise ConfigError(f"{where} does not say '{key}'; give {key}={example} or what it is.")
        assert isinstance(value, int)
        return value
