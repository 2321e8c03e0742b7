"""What the sections of trained models (``trainer``, ``critic``) share: optimizer, precision, memory, LoRA."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from dataflow.config.section import Section, Share, Text
from dataflow.errors import ConfigError, counted

TORCH = "torch.optim"
OPTIMIZERS = (
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "SGD",
)  # fmt: skip
"""Optimizers of torch.optim that take any weights and a weight decay, and need no closure."""
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
    optimizer_impl: Text = TORCH
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

    @property
    def in_torch(self) -> bool:
        """Whether the optimizer is one of torch's own."""
        return self.optimizer_impl == TORCH

    def warmup_in(self, steps: int) -> int:
        """Returns the number of warm-up steps of a run of ``steps``."""
        return int(self.warmup_ratio * steps) if self.warmup_steps is None else self.warmup_steps

    @model_validator(mode="after")
    def _fit_each_other(self) -> TrainedConfig:
        name = self.section
        if self.in_torch and self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"{name}.optimizer={self.optimizer}: {TORCH} has none of that name; give one of "
                f"{', '.join(OPTIMIZERS)}, or the module that has it as {name}.optimizer_impl."
            )
        if self.warmup_ratio and self.warmup_steps is not None:
            raise ConfigError(
                f"{name}.warmup_ratio={self.warmup_ratio:g} and {name}.warmup_steps={self.warmup_steps} are two "
                f"numbers for one; give {name}.warmup_steps=null beside the ratio, or leave that out."
            )
        changed = [key for key, value in LoraConfig() if getattr(self.lora, key) != value]
        if self.lora.rank is None and changed:
            raise ConfigError(
                f"{name}.lora.{changed[0]} has no effect without {name}.lora.rank; give that, such as 32."
            )
        return self

    def check_device(self, device: str) -> None:
        """Checks that the model can be trained so on a device.

        Args:
            device: "cpu" or "cuda".

        Raises:
            ConfigError: an option needs GPUs.
        """
        for key in ("param_offload", "optimizer_offload", "activation_offload") if device == "cpu" else ():
            if getattr(self, key):
                raise ConfigError(
                    f"{self.section}.{key}=true moves tensors from GPUs to CPU memory, and this run computes on CPUs "
                    "(ray.gpus_per_worker=0); leave it out."
                )

    def check_run(self, steps: int, world: int, default: TrainedConfig) -> None:
        """Checks what depends on the run.

        Args:
            steps: of the run.
            world: ranks of the trainer.
            default: the pipeline's own, whose warm-up a short run may have.

        Raises:
            ConfigError: the warm-up is longer than the run, or copies of the model do not fit the ranks.
        """
        name, warmup = self.section, self.warmup_steps
        if warmup is not None and warmup > steps and warmup != default.warmup_steps:
            raise ConfigError(
                f"{name}.warmup_steps={warmup}: the run has only {counted(steps, 'step')} (steps), so that "
                f"{name}.lr is never reached; give fewer."
            )
        if self.fsdp_size is not None and world % self.fsdp_size:
            raise ConfigError(
                f"{name}.fsdp_size={self.fsdp_size} does not divide trainer.world_size={world}; give a divisor of it."
            )
