"""The configuration of a run that trains a language model: a pydantic model per section.

A pipeline file defines a ``Config`` that derives from :class:`RunConfig` and may add keys or other defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from dataflow.algorithms import ESTIMATORS
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.base import BaseConfig, PolicyConfig, dump_yaml, values_of
from dataflow.config.engine import EngineConfig
from dataflow.config.keys import verl_keys
from dataflow.config.keys.nested import at
from dataflow.config.keys.overrides import describe, parse_overrides
from dataflow.config.placement import Placement
from dataflow.config.reward import (
    CustomRewardConfig,
    JudgeConfig,
    RewardConfig,
    Source,
    SourceConfig,
    concurrency_of,
    sources_of,
)
from dataflow.config.section import Fraction, Section, Text
from dataflow.config.tools import ToolsConfig
from dataflow.config.training import TrainedConfig, TrainerConfig
from dataflow.errors import ConfigError, counted
from dataflow.rewards.naming import keyed

if TYPE_CHECKING:
    from dataflow.rewards.steps import GroupFilter

__all__ = [
    "EngineConfig",
    "PolicyConfig",
    "RunConfig",
    "Section",
    "TrainerConfig",
    "describe",
    "dump_yaml",
    "parse_overrides",
    "values_of",
]


class DataConfig(Section):
    """Problems to train and to evaluate on."""

    train: Text | list[Text] | None = None
    """Training problems, .jsonl or .parquet, or several such files; null generates word problems."""
    val: Text | list[Text] | None = None
    """Held-out problems, likewise."""
    prompts: PositiveInt = 32
    """Prompt groups per step."""
    gen_batch_size: PositiveInt | None = None
    """Prompt groups that a step samples if algorithm.filter_groups leaves some out; null for twice data.prompts."""
    image_key: Text = "images"
    """Column of the prompts' images: lists of bytes, paths, or dicts with one of them."""
    max_prompt_length: PositiveInt = 1024
    """Longest prompt in tokens, chat template and images included."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to a longer prompt: an error, or the side to cut."""
    filter_overlong_prompts: bool = False
    """Drop longer prompts instead."""
    apply_chat_template_kwargs: dict[str, Any] = Field(default={})
    """Options of the model's chat template, such as {enable_thinking: false}, wherever the run renders a chat."""
    shuffle: bool = True
    """Draw the training problems in a seeded random order."""
    train_size: PositiveInt = 4000
    """Number of generated training problems."""
    val_size: PositiveInt = 512
    """Maximum number of held-out problems to evaluate on."""


class ModelConfig(Section):
    """A model; the actor, unless a pipeline has others."""

    tiny: ClassVar[str] = "default"
    """Which tiny model stands in for null, by the name of its recipe."""

    path: Text | None = None
    """Directory or hub id of a Hugging Face causal LM or Qwen2-VL; null makes a tiny Qwen2 and caches it."""


class ValConfig(Section):
    """Evaluation on held-out problems."""

    every: NonNegativeInt = 3
    """Steps between evaluations; 0 never evaluates."""
    n: PositiveInt = 1
    """Responses per problem."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Fraction = 1.0
    """Nucleus mass kept; 1 keeps all."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Most likely tokens kept; -1 or 0 keeps all."""


class SamplesConfig(Section):
    """Prompts, responses and scores, saved in the run's directory (dataflow samples)."""

    every: NonNegativeInt = 1
    """Steps from one that is kept to the next; 0 keeps none, those of evaluations included."""
    most: PositiveInt | None = 2048
    """Samples kept of a step, at most: whole groups, the lowest ids first; null keeps all."""


class RunConfig(BaseConfig):
    """All settings of a run that trains a language model. Its pipeline derives its ``Config`` from it."""

    elsewhere: ClassVar[Callable[..., str | None]] = staticmethod(verl_keys.hint)
    """Returns a message with the equivalent of verl's key."""

    unread: ClassVar[Mapping[str, str]] = {}
    """Keys and sections that no stage reads, and why; a value other than the default is refused."""

    placement: Placement = "colocated"
    """colocated: engine and trainer take turns on the same GPUs; disaggregated: each has its own GPUs, in parallel."""
    data: DataConfig = Field(default_factory=DataConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    tools: ToolsConfig = Field(default_factory=ToolsConfig)
    trainer: TrainerConfig = Field(default_factory=TrainerConfig)
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    reward: RewardConfig = Field(default_factory=RewardConfig)
    custom_reward_function: CustomRewardConfig = Field(default_factory=CustomRewardConfig)
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    val: ValConfig = Field(default_factory=ValConfig)
    samples: SamplesConfig = Field(default_factory=SamplesConfig)

    @property
    def response_length(self) -> int:
        """Maximum tokens of a response, all turns together."""
        return self.tools.max_response_tokens if self.tools.offered else self.engine.max_tokens

    @property
    def engine_memory(self) -> float:
        """Share of a GPU's memory that the rollout engine takes; see ``engine.gpu_memory``."""
        return self.engine.gpu_memory or (0.6 if self.placement == "colocated" else 0.9)

    @property
    def trained(self) -> dict[str, TrainedConfig]:
        """The sections of the models that are trained, by name."""
        found = {name: getattr(self, name) for name in type(self).model_fields}
        return {name: value for name, value in found.items() if isinstance(value, TrainedConfig)}

    @property
    def group_filter(self) -> GroupFilter | None:
        """Which finished groups a step leaves out, and how many at most; None for none."""
        from dataflow.rewards.steps import GroupFilter

        if not self.algorithm.filter_groups.enable:
            return None
        sampled, trained = self.data.gen_batch_size or 2 * self.data.prompts, self.data.prompts
        if sampled <= trained:
            raise ConfigError(
                f"data.gen_batch_size={sampled} leaves algorithm.filter_groups no group to leave out of "
                f"data.prompts={trained}; give more."
            )
        return GroupFilter(sampled - trained, self.algorithm.filter_groups.metric)

    @property
    def extra_groups(self) -> int:
        """Groups that a step samples beyond those it trains on."""
        return self.reward.extra_groups + (self.group_filter.most if self.group_filter else 0)

    @property
    def optimizer_steps(self) -> int:
        return self.trainer.mini_batches

    @property
    def step_groups(self) -> int:
        return self.data.prompts

    @property
    def gpus(self) -> int:
        """See :attr:`BaseConfig.gpus`: those of the trainer, of engines apart and of reward models on their own."""
        own = self.placement == "disaggregated" and self.engine.rollout != "http"
        engines = self.engine.replicas * self.engine.tensor_parallel if own else 0
        served = [m for m in self.reward.models.values() if m.url is None and m.placement == "own"]
        return self.trainer.world_size + engines + sum(m.replicas * m.tensor_parallel for m in served)

    @property
    def worker_threads(self) -> int:
        return self.trainer.threads

    @property
    def recoveries(self) -> int:
        return self.trainer.restarts

    def job(self) -> dict[str, Any]:
        """See :meth:`BaseConfig.job`."""
        main, *others = sources_of(self)
        agents = {source.name: _limits(self, source) for source in others}
        known = {"responses": self.engine.n, **_limits(self, main), "agents": agents}
        return {**super().job(), **{key: value for key, value in known.items() if value != {}}}

    @field_validator("*", mode="wrap")
    @classmethod
    def _name_the_keys_of_an_agent(cls, value: Any, build: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
        """The rules of section reward, which every agent's section shares, name its keys."""
        name = str(info.field_name)
        try:
            return build(value)
        except ConfigError as error:
            kind = cls.model_fields[name].annotation
            if isinstance(kind, type) and issubclass(kind, SourceConfig):
                raise ConfigError(keyed(str(error), name)) from error
            raise

    @model_validator(mode="after")
    def _servers_are_apart(self) -> RunConfig:
        if self.engine.rollout != "http":
            return self
        if self.placement == "colocated" and "placement" in self.model_fields_set:
            raise ConfigError("placement=colocated: servers of engine.rollout=http have other GPUs; leave it out.")
        self.placement = "disaggregated"
        return self

    @model_validator(mode="after")
    def _fit_together(self) -> RunConfig:
        from dataflow.policy import check_batch

        batches, world = self.trainer.mini_batches, self.trainer.world_size
        check_batch(self.data.prompts, batches, "trainer.mini_batches")
        self.policy.resolve(batches)
        rows = self.data.prompts // batches * self.engine.n
        if rows % world:
            sizes = "data.prompts / trainer.mini_batches x engine.n"
            raise ConfigError(
                f"trainer.world_size={world} does not divide a mini-batch's {counted(rows, 'row')} ({sizes})."
            )
        for section in self.trained.values():
            section.check_ranks(world)
        _ = self.group_filter
        self._check_unread()
        self._check_estimator()
        return self

    def _check_unread(self) -> None:
        for key, instead in self.unread.items():
            section, _, name = key.rpartition(".")
            held = at(self, section) if section else self
            if getattr(held, name) != type(held).model_fields[name].get_default(call_default_factory=True):
                raise ConfigError(f"{key} has no effect in this pipeline: {instead}; leave it out.")

    def _check_estimator(self) -> None:
        n, estimator = self.engine.n, self.algorithm.adv_estimator
        if "algorithm.adv_estimator" in self.unread:
            return
        # GPG takes the raw score of a single response.
        if n < 2 and ESTIMATORS[estimator].against == "group" and estimator != "gpg":
            raise ConfigError(f"engine.n={n}: '{estimator}' compares one prompt's responses; give 2 or more.")


def _limits(config: RunConfig, source: Source) -> dict[str, Any]:
    """Returns what a plan needs to know of a reward agent: its limits."""
    return {"concurrency": concurrency_of(config, source), "rpm": source.options.rpm, "tpm": source.options.tpm}
