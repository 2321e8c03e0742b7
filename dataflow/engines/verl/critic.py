"""VerlCritic: the value model of PPO. What it shares with other trained models is in ``model.py``."""

from __future__ import annotations

from typing import Any

from dataflow.batch import Batch
from dataflow.engines.verl.loss import value_loss_of
from dataflow.engines.verl.model import TrainedModel
from dataflow.engines.verl.rows import inputs_of


class VerlCritic(TrainedModel):
    """Estimates the return of each token; implements the Critic Protocol. RANK, ... come from the environment.

    Args:
        model: directory of a causal LM, whose body it begins with; its head is new, drawn from ``seed``.
        critic: section ``critic``, a :class:`~dataflow.config.training.critic.CriticConfig`.
        total_steps: training steps of the run.
        seed: of everything random.
        device: "cpu" (gloo) or "cuda" (nccl).
        threads: CPU threads.
        shares_gpu: whether another service uses the GPU while this one is idle; torch's cached memory is freed then.

    Raises:
        ConfigError: training is not possible with an option.
    """

    name = "critic"

    def __init__(
        self,
        model: str,
        critic: Any,
        total_steps: int,
        seed: int = 0,
        device: str = "cpu",
        threads: int = 1,
        shares_gpu: bool = False,
    ) -> None:
        super().__init__(
            model,
            critic,
            kind="value_model",
            total_steps=total_steps,
            temperature=1.0,
            seed=seed,
            device=device,
            threads=threads,
            shares_gpu=shares_gpu,
        )
        self.loss_agg_mode = critic.loss_agg_mode
        self.worker.set_loss_fn(value_loss_of(critic))

    def values(self, batch: Batch) -> Batch:
        """Returns ``values``, float32 ``[rows, R]``: the return expected before each token; 0 where the mask is."""
        return batch.like(**self._infer(self.worker, batch, ["values"]))

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        """Takes one optimizer step on all rows that have a token to train on.

        If none has, no step is taken: weights and optimizer stay bit for bit, and only the LR scheduler may step.

        Args:
            batch: columns of the responses, ``values`` (those that the advantages were made of: predictions are
                clipped around them) and ``returns``, float32 ``[rows, R]``.
            last: whether it is the last one of the training step, after which the LR scheduler steps.

        Returns:
            verl's metrics, the same on every rank: ``critic/vf_loss``, ``critic/vf_clipfrac``, ``critic/vpred_mean``,
            ``critic/grad_norm``, ``critic/lr``. If no step was taken, as none has or the gradient is not finite,
            only this rate and ``critic/skipped_updates``, which is 1.
        """
        trainable = self._trainable(batch)
        if trainable is None:
            return self._skip(last)
        return self._step(inputs_of(trainable, "values", "returns"), last)
