"""Section ``critic`` of a pipeline that trains one: the value model and its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from dataflow.config.keys import verl_keys
from dataflow.config.keys.verl_keys import Meaning
from dataflow.config.section import Beta, Section, Text

if TYPE_CHECKING:
    from dataflow.policy import SchedulingPolicy


class CriticConfig(Section):
    """The critic: a value model with an optimizer of its own."""

    path: Text | None = None
    """Directory or hub id of the causal LM whose body it begins with; null takes the actor's, model.path."""
    warmup: NonNegativeInt = 0
    """Steps at the beginning in which only the critic is trained."""
    lr: PositiveFloat = 1e-3
    """Learning rate after its warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """AdamW's two betas."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the learning rate rises from 0."""
    grad_clip: PositiveFloat = 1.0
    """Largest gradient norm."""
    mini_batches: PositiveInt | None = None
    """Optimizer steps in a pass over a step's groups; must divide data.prompts. null takes trainer.mini_batches."""
    epochs: PositiveInt = 1
    """How often each mini-batch is used."""
    micro_batch_size: PositiveInt = 64
    """Rows per rank in one forward and backward pass."""
    cliprange_value: PositiveFloat = 0.5
    """How far a prediction may move from the value that the advantages were made of, until the loss is clipped."""
    loss_agg_mode: Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    """How token losses are aggregated."""

    def check_mini_batches(self, policy: SchedulingPolicy, prompts: int) -> None:
        """Checks that the critic's own mini-batches are of whole groups, and the policy's parts of whole mini-batches.

        Raises:
            PolicyError: the message lists the valid numbers.
        """
        from dataflow.policy import check_batch, check_split

        if self.mini_batches is not None:
            check_batch(prompts, self.mini_batches, "critic.mini_batches")
            check_split(policy, self.mini_batches, "critic.mini_batches")


_DYNAMIC = "micro-batches have a fixed number of rows, critic.micro_batch_size"

KEYS: dict[str, Meaning] = {
    "critic.optim.lr": Meaning("critic.lr"),
    "critic.optim.betas": Meaning("critic.betas"),
    "critic.optim.weight_decay": Meaning("critic.weight_decay"),
    "critic.optim.lr_warmup_steps": Meaning("critic.warmup_steps"),
    "critic.optim.lr_warmup_steps_ratio": Meaning("critic.warmup_steps", "steps, not a share of them"),
    "critic.optim.total_training_steps": Meaning("steps"),
    "critic.optim.clip_grad": Meaning("critic.grad_clip"),
    "critic.model.path": Meaning("critic.path"),
    "critic.model.tokenizer_path": Meaning(None, "it reads the actor's tokens"),
    "critic.model.enable_gradient_checkpointing": Meaning(None, "it cannot be chosen"),
    "critic.model.use_remove_padding": Meaning(None, "it cannot be chosen"),
    "critic.ppo_mini_batch_size": Meaning(
        "critic.mini_batches", "the number of mini-batches in a step: data.prompts divided by verl's value"
    ),
    "critic.ppo_micro_batch_size_per_gpu": Meaning("critic.micro_batch_size"),
    "critic.ppo_micro_batch_size": Meaning("critic.micro_batch_size", "rows per rank, not of all ranks"),
    "critic.ppo_epochs": Meaning("critic.epochs", "each mini-batch is used that often before the next one"),
    "critic.use_dynamic_bsz": Meaning(None, _DYNAMIC),
    "critic.ppo_max_token_len_per_gpu": Meaning(None, _DYNAMIC),
    "critic.forward_max_token_len_per_gpu": Meaning(None, _DYNAMIC),
    "critic.enable": Meaning(None, "this pipeline always has a critic"),
    "critic.strategy": Meaning(None, "training is FSDP2"),
    "critic.shuffle": Meaning(None, "groups form mini-batches as policy.order says"),
    "trainer.critic_warmup": Meaning("critic.warmup", "the steps before the actor's first, verl's value minus 1"),
}
"""verl's keys of a critic, by their full names."""


def hint(key: str, exactly: bool = False) -> str | None:
    """Returns the name of a verl key in a pipeline with a critic, as :func:`dataflow.config.keys.verl_keys.hint` does.

    >>> hint("critic.optim.lr")
    "verl's 'critic.optim.lr' is 'critic.lr' here."
    """
    sections = {name: said for name, said in verl_keys.SECTIONS.items() if name != "critic"}
    return verl_keys.hint(key, exactly, {**verl_keys.KEYS, **KEYS}, sections)
