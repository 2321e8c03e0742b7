"""Sections ``trainer`` and ``critic``: the models that are trained, their optimizers, precision and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from dataflow.config.section import Section, Share, Text
from dataflow.errors import ConfigError

if TYPE_CHECKING:
    from dataflow.policy import SchedulingPolicy

Beta = Annotated[float, Field(ge=0, lt=1)]


class LoraConfig(Section):
    """LoRA: train low-rank adapters beside frozen weights."""

    rank: PositiveInt | None = None
    """Rank of the adapters; null trains all weights."""
    alpha: PositiveFloat = 16.0
    """What the adapters' product is scaled by, divided by the rank."""
    target_modules: Text | list[Text] = "all-linear"
    """Layers with an adapter: all-linear (all but the head), names as [q_proj,v_proj], or a regular expression."""
    exclude_modules: Text | list[Text] | None = None
    """Layers without one, likewise."""
    adapter: Text | None = None
    """Directory of an adapter of this rank to begin with, in peft's form; null begins with a new one."""


class TrainedConfig(Section):
    """A model that is trained: its optimizer, its precision, and where it is kept."""

    section: ClassVar[str]
    """Name of the section, for messages."""

    lr: PositiveFloat = 1e-6
    """Learning rate after the warm-up."""
    optimizer: Text = "AdamW"
    """Name of the optimizer, a class of optimizer_impl."""
    optimizer_impl: Text = "torch.optim"
    """Python module of the optimizer, such as bitsandbytes.optim for AdamW8bit."""
    optimizer_kwargs: dict[str, Any] = Field(default={})
    """Further arguments of the optimizer, such as {momentum: 0.9} of SGD."""
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """The two betas of Adam and its kin."""
    weight_decay: NonNegativeFloat = 0.01
    """Weight decay."""
    lr_scheduler: Literal["constant", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling along a cosine until the last step."""
    warmup_steps: NonNegativeInt | None = None
    """Steps over which the learning rate rises from 0; null takes warmup_ratio."""
    warmup_ratio: Share = 0.0
    """The same as a share of all steps."""
    min_lr_ratio: Share = 0.0
    """Least learning rate of a cosine, as a share of lr."""
    lr_cycles: PositiveFloat = 0.5
    """Waves of the cosine; 0.5 only falls."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    micro_batch_size: PositiveInt = 64
    """Rows per rank in one forward and backward pass."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type that a pass computes in; auto: bfloat16 on GPUs, float32 on CPUs."""
    model_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that weights are kept in, and with them gradients and the optimizer's state."""
    gradient_checkpointing: bool | None = None
    """Compute activations again for the gradient instead of keeping them; null: on GPUs only."""
    activation_offload: bool = False
    """Keep activations in CPU memory until the gradient needs them (GPUs only)."""
    param_offload: bool = False
    """Keep weights and gradients in CPU memory while the model computes nothing (GPUs only)."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in CPU memory between updates (GPUs only)."""
    fsdp_size: PositiveInt | None = None
    """Ranks that one copy of the model is split over; must divide trainer.world_size. null: all ranks."""
    reshard_after_forward: bool = True
    """Drop a layer's gathered weights after its forward pass, and gather them again for its gradient."""
    forward_prefetch: bool = False
    """Gather the next layer's weights while a layer computes."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Low-rank adapters beside frozen weights."""

    def warmup_in(self, steps: int) -> int:
        """Returns the number of warm-up steps of a run of ``steps``."""
        return int(self.warmup_ratio * steps) if self.warmup_steps is None else self.warmup_steps

    @model_validator(mode="after")
    def _fit_each_other(self) -> TrainedConfig:
        if self.warmup_ratio and self.warmup_steps is not None:
            raise ConfigError(
                f"{self.section}.warmup_ratio={self.warmup_ratio:g} and {self.section}.warmup_steps="
                f"{self.warmup_steps} are two numbers for one; give {self.section}.warmup_steps=null beside the ratio, "
                "or leave that out."
            )
        return self

    def check_ranks(self, world: int) -> None:
        """Checks that copies of the model fit the trainer's ranks, ``world`` of them."""
        if self.fsdp_size is not None and world % self.fsdp_size:
            raise ConfigError(
                f"{self.section}.fsdp_size={self.fsdp_size} does not divide trainer.world_size={world}; give a divisor "
                "of it."
            )


class TrainerConfig(TrainedConfig):
    """Optimizer steps."""

    section: ClassVar[str] = "trainer"

    world_size: Annotated[int, Field(gt=0, le=65536)] = 1
    """Trainer processes; they share each mini-batch's rows."""
    mini_batches: PositiveInt = 4
    """Optimizer steps per step; must divide data.prompts."""
    epochs: PositiveInt = 1
    """How often each mini-batch of a step is used."""
    epochs_over: Literal["mini-batch", "step"] = "mini-batch"
    """mini-batch: all epochs of a mini-batch before the next one, the same order under every policy. step: each epoch
    passes over the whole step, as in verl; only for policies that do not split the step."""
    max_tokens_per_gpu: PositiveInt | None = None
    """Most tokens per rank in one pass, which then takes as many rows as fit; null: trainer.micro_batch_size rows."""
    balance_batch: bool = False
    """Give the ranks rows of about the same number of tokens together; false: consecutive rows."""
    threads: Annotated[int, Field(gt=0, le=1024)] = 1
    """CPU threads per rank."""
    restarts: NonNegativeInt = 2
    """How often the run restarts from its last checkpoint after a trainer process died."""
    max_skipped: PositiveInt = 10
    """Updates that may be skipped in a row, of the actor or of a critic, before the run ends: those whose gradient is
    not finite, and those without a sample to train on."""


class CriticConfig(TrainedConfig):
    """The critic: a value model with an optimizer of its own."""

    section: ClassVar[str] = "critic"

    path: Text | None = None
    """Directory or hub id of the causal LM whose body it begins with; null takes the actor's, model.path."""
    warmup: NonNegativeInt = 0
    """Steps at the beginning in which only the critic is trained."""
    lr: PositiveFloat = 1e-5
    """Learning rate after its warm-up."""
    mini_batches: PositiveInt | None = None
    """Optimizer steps in a pass over a step's groups; must divide data.prompts. null takes trainer.mini_batches."""
    epochs: PositiveInt = 1
    """How often each mini-batch is used."""
    cliprange_value: PositiveFloat = 0.5
    """How far a prediction may move from the value that the advantages were made of, until the loss is clipped."""
    loss_agg_mode: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses are aggregated."""

    def check_mini_batches(self, policy: SchedulingPolicy, prompts: int) -> None:
        """Checks that the critic's mini-batches are of whole groups, and the policy's parts of whole mini-batches."""
        from dataflow.policy import check_batch, check_split

        if self.mini_batches is not None:
            check_batch(prompts, self.mini_batches, "critic.mini_batches")
            check_split(policy, self.mini_batches, "critic.mini_batches")


def toy_trainer() -> TrainerConfig:
    """Returns section ``trainer`` for the recipes' own models, of a million weights; it would ruin a real one."""
    return TrainerConfig(lr=2e-4, betas=(0.9, 0.99), weight_decay=0.0, warmup_steps=5)


def toy_critic() -> CriticConfig:
    """Returns section ``critic`` likewise."""
    return CriticConfig(lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0)
