"""Section ``critic`` of a pipeline that trains one: the value model and its optimizer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from dataflow.config.keys import verl_keys
from dataflow.config.section import Text
from dataflow.config.training.trained import TrainedConfig

if TYPE_CHECKING:
    from dataflow.policy import SchedulingPolicy


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
        """Checks that the critic's own mini-batches are of whole groups, and the policy's parts of whole mini-batches.

        Raises:
            PolicyError: the message lists the valid numbers.
        """
        from dataflow.policy import check_batch, check_split

        if self.mini_batches is not None:
            check_batch(prompts, self.mini_batches, "critic.mini_batches")
            check_split(policy, self.mini_batches, "critic.mini_batches")


hint = functools.partial(verl_keys.hint, critic=True)
"""Answers a key of verl in a pipeline with a critic."""
