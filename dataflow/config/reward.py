"""The configuration of rewards: the agents, the user's reward function, the judge.

A run has an agent ``reward``, of the sections ``reward``, ``custom_reward_function`` and ``judge``. A pipeline with
several agents has a section of type :class:`SourceConfig` for each further one; the section's name is the agent's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from dataflow.config.section import Section, Share, Text
from dataflow.config.served import PromptConfig, ServedModelConfig
from dataflow.errors import ConfigError, nearest
from dataflow.rewards.failure import parse_rule
from dataflow.rewards.naming import MAIN

Rate = Annotated[float, Field(ge=0.001)]
"""Per minute; below, a single request would wait for most of a day."""


class RewardConfig(Section):
    """The reward agent: how requests are sent, and what happens to those that fail."""

    concurrency: PositiveInt = 64
    """Reward requests in flight."""
    rpm: Rate | None = None
    """Requests that may begin in any minute; null for no limit."""
    tpm: Rate | None = None
    """Tokens that may be sent for in any minute; null for no limit."""
    adaptive: bool = False
    """Lower the concurrency on 429, 503, 529 and time-outs, and raise it again afterwards."""
    floor: PositiveInt = 1
    """Where adaptive stops lowering."""
    timeout: PositiveFloat | None = 120.0
    """Seconds that one try may take; null for no limit."""
    tries: PositiveInt = 4
    """Tries of a request with transient errors: a time-out, a broken connection, 5xx, but for 429, 503 and 529."""
    deadline: PositiveFloat | None = 600.0
    """Seconds that all tries of a request may take together; null for no limit, and 429, 503 and 529 count as tries."""
    backoff: NonNegativeFloat = 0.5
    """Maximum of the random wait before a second try, in seconds; doubled for each further try."""
    max_backoff: NonNegativeFloat = 30.0
    """Largest such maximum, in seconds; a server's Retry-After may be longer."""
    hedge_after: Text | PositiveFloat | None = None
    """Send a second request when the first takes longer than this: a percentile (p95) or seconds; null never does."""
    on_failure: Text = "fail"
    """What happens to a failed sample: fail, score:X, drop_sample, drop_group or replace_group."""
    max_failed_share: Share = 0.1
    """The run stops when more than this share of its latest reward requests has failed."""
    extra_groups: NonNegativeInt = 0
    """Prompt groups that a step samples beyond data.prompts, to replace failed ones (replace_group)."""
    max_abandoned: NonNegativeInt | None = None
    """Calls that may keep running after their time-out, before the run ends; null for as many as may be in flight."""
    ledger: bool = True
    """Journal requests and answers in the run's directory, so that nothing is paid for twice."""
    share_equal: bool = True
    """Make one call for requests in flight with the same prompt and response."""
    manager: Text = "naive"
    """Reward manager: naive, dapo, rate_limited, remote or sandbox; with manager_path the class in that file."""
    manager_path: Text | None = None
    """Python file that defines the manager."""
    manager_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Options of the manager."""
    model: Text | None = None
    """Name of the reward model (reward.models) that scores, or that a function asks; null for the only one."""
    models: dict[str, ServedModelConfig] = Field(default_factory=dict)
    """Reward models of the run by name, for all its agents."""
    router_address: Text | None = None
    """Passed to a reward function as reward_router_address if it has that parameter; null for its model's."""
    model_tokenizer: Text | None = None
    """Path of a tokenizer, passed to a reward function as reward_model_tokenizer if it has that parameter."""
    frozen_after: NonNegativeFloat | None = None
    """Seconds that a call may block the agent's process (ray); null for timeout, but at least 10; 0 for no limit."""
    restarts: NonNegativeInt = 3
    """How often the agent's process may be restarted after it died."""

    @field_validator("on_failure")
    @classmethod
    def _on_failure_is_a_rule(cls, rule: str) -> str:
        parse_rule(rule)
        return rule

    @field_validator("hedge_after")
    @classmethod
    def _hedge_after_is_a_time(cls, after: str | float | None) -> str | float | None:
        from dataflow.rewards.retry import parse_hedge

        parse_hedge(after)
        return after

    @field_validator("models")
    @classmethod
    def _models_have_names_of_files(cls, models: dict[str, ServedModelConfig]) -> dict[str, ServedModelConfig]:
        for name in models:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}", name):
                raise ConfigError(
                    f"reward.models: '{name}' is no name of a reward model; give letters, digits, - and _, such as rm."
                )
        return models

    @model_validator(mode="after")
    def _extra_groups_fit_the_rule(self) -> RewardConfig:
        if (self.on_failure == "replace_group") != bool(self.extra_groups):
            raise ConfigError(
                "reward.on_failure=replace_group and reward.extra_groups go together: "
                "give the groups that a step makes to replace failed ones, 1 or more."
            )
        return self

    @model_validator(mode="after")
    def _deadline_allows_a_try(self) -> RewardConfig:
        if self.timeout is not None and self.deadline is not None and self.deadline < self.timeout:
            raise ConfigError(
                f"reward.deadline={self.deadline:g} ends a request before its first try may time out "
                f"(reward.timeout={self.timeout:g}); raise reward.deadline or lower reward.timeout."
            )
        return self


class CustomRewardConfig(Section):
    """The user's reward function, in place of the judge; verl's names."""

    path: Text | None = None
    """Python file that defines it, or pkg:// and an installed module; null uses the judge.

    verl's pkg://verl.utils.reward_score is stricter on GSM8K than pkg://dataflow.rewards.gsm8k (verl#7274)."""
    name: Text = "compute_score"
    """Function or class in that file."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments it is called with besides verl's four."""


class JudgeConfig(PromptConfig):
    """The HTTP judge of the default reward."""

    url: Text | None = None
    """Base URL of an OpenAI-style server, or of a router in front of several; null starts a stand-in on loopback."""
    model: Text = "judge"
    """Model name in the requests."""
    api_key_env: Text | None = None
    """Environment variable that holds the API key."""
    max_tokens: Annotated[int, Field(gt=0, le=2**63 - 1)] | None = None
    """Budget of the run in tokens, prompts and replies; the next request after it stops the run. Null for none."""
    max_cost: PositiveFloat | None = None
    """Budget of the run in the currency of price_per_million; null for none."""
    price_per_million: tuple[NonNegativeFloat, NonNegativeFloat] | None = None
    """Price of a million prompt tokens and of a million reply tokens."""
    latency: Text = "uniform:1:40"
    """Distribution of the delays of the stand-in, in seconds."""
    time_scale: NonNegativeFloat = 0.02
    """Factor on these delays; 0 answers at once."""

    def client_options(self) -> dict[str, Any]:
        """Returns the keyword arguments of :class:`~dataflow.rewards.judge.judge.Judge`."""
        return self.model_dump(exclude={"latency", "time_scale"})

    @field_validator("latency")
    @classmethod
    def _latency_is_a_distribution(cls, latency: str) -> str:
        from dataflow.distribution import parse_distribution

        parse_distribution(latency, "judge.latency")
        return latency


class SourceConfig(RewardConfig):
    """A further reward agent: the keys of section reward, and what scores."""

    custom_reward_function: CustomRewardConfig = Field(default_factory=CustomRewardConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)

    @field_validator("models")
    @classmethod
    def _models_are_of_section_reward(cls, models: dict[str, ServedModelConfig]) -> dict[str, ServedModelConfig]:
        if name := next(iter(models), None):
            raise ConfigError(
                f"models.{name}: the models of all agents are in section reward; give it there, and here model={name}."
            )
        return models


class Source(NamedTuple):
    """The sections of one reward agent; the judge is used where there is no ``custom`` function.

    ``name`` is that of the agent, of its service, and of the resource on which its rewards are collected.
    """

    name: str
    options: RewardConfig
    custom: CustomRewardConfig
    judge: JudgeConfig


def sources_of(config: Any) -> Iterator[Source]:
    """Yields the reward agents of a :class:`~dataflow.config.run.RunConfig`, ``reward`` first."""
    yield Source(MAIN, config.reward, config.custom_reward_function, config.judge)
    for name in type(config).model_fields:
        section = getattr(config, name)
        if isinstance(section, SourceConfig):
            yield Source(name, section, section.custom_reward_function, section.judge)


def model_of(config: Any, source: Source) -> str | None:
    """Returns the name of the reward model that scores an agent's requests; None if none does."""
    if source.custom.path is not None:
        return None
    if source.options.model is not None:
        return source.options.model
    models, others = config.reward.models, [each for each in sources_of(config) if each.name != MAIN]
    taken = {other.options.model for other in others}
    alone = source.name == MAIN and len(models) == 1 and taken.isdisjoint(models)
    return next(iter(models)) if alone and source.judge.url is None else None


def asked_of(config: Any, source: Source) -> str | None:
    """Returns the name of the reward model whose address an agent's function gets; None without a function or model."""
    models = config.reward.models
    if source.custom.path is None or not models:
        return None
    return source.options.model or (next(iter(models)) if len(models) == 1 else None)


def concurrency_of(config: Any, source: Source) -> int:
    """Returns an agent's requests in flight at most: by default as many as the servers of its model take at once."""
    model = config.reward.models.get(model_of(config, source))
    if model is None or "concurrency" in source.options.model_fields_set:
        return source.options.concurrency
    return int(model.servers * model.max_num_seqs)


def source_of(config: Any, name: str) -> Source:
    """Returns the sections of the reward agent of this name; a ConfigError says that there is none."""
    sources = {source.name: source for source in sources_of(config)}
    if name not in sources:
        raise ConfigError(
            f"the configuration has no reward agent '{name}'{nearest(name, sources)}; give the pipeline's Config a "
            f"section of type SourceConfig: {name}: SourceConfig = Field(default_factory=SourceConfig)."
        )
    return sources[name]
