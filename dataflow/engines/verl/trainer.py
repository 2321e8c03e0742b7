"""VerlTrainer: the actor. What it shares with other trained models is in ``model.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dataflow.algorithms.estimators import SUMS_SQUARES
from dataflow.batch import Batch
from dataflow.engines.verl.export import write_model
from dataflow.engines.verl.loss import loss_of
from dataflow.engines.verl.model import TrainedModel
from dataflow.engines.verl.rows import inputs_of
from dataflow.engines.verl.setup.process import quiet
from dataflow.errors import ConfigError


class VerlTrainer(TrainedModel):
    """Trains the actor; implements the Trainer Protocol. RANK, WORLD_SIZE, ... come from the environment.

    Args:
        model: directory or Hugging Face id of a causal LM.
        trainer: section ``trainer``, a :class:`~dataflow.config.run.TrainerConfig`.
        algorithm: the options of section ``algorithm`` that the loss reads
            (:func:`dataflow.engines.verl.loss.loss_of`), and adv_estimator.
        total_steps: training steps of the run.
        response_length: longest response, in tokens; what ``seq-mean-token-sum-norm`` divides by.
        temperature: of the rollout; log-probs are those of the logits divided by it.
        seed: of everything random.
        device: "cpu" (gloo) or "cuda" (nccl).
        reference: whether ``ref_log_probs`` is needed: the frozen initial weights are held as well, unless those beside
            a LoRA adapter are they.
        shares_gpu: whether another service uses the GPU while this one is idle; torch's cached memory is freed then.

    Raises:
        ConfigError: training is not possible with an option.
    """

    name = "actor"

    def __init__(
        self,
        model: str,
        trainer: Any,
        algorithm: Any,
        total_steps: int,
        response_length: int,
        temperature: float = 1.0,
        seed: int = 0,
        device: str = "cpu",
        reference: bool = False,
        shares_gpu: bool = False,
    ) -> None:
        if temperature <= 0:
            raise ConfigError(f"engine.temperature={temperature}: training divides by it; give more than 0.")
        if algorithm.use_kl_loss and not reference:
            raise ConfigError("algorithm.use_kl_loss needs the reference: build the trainer with reference=True.")
        self.algorithm = algorithm
        self.loss_agg_mode = algorithm.loss_agg_mode
        super().__init__(
            model,
            trainer,
            kind="language_model",
            total_steps=total_steps,
            temperature=temperature,
            seed=seed,
            device=device,
            threads=trainer.threads,
            shares_gpu=shares_gpu,
            max_tokens=trainer.max_tokens_per_gpu,
            balance=trainer.balance_batch,
        )
        self.reference = self.worker if reference and self.adapted else None
        if reference and self.reference is None:
            with quiet():
                # A second copy of the weights, which is never trained.
                self.reference = self._build(offload=device == "cuda")
        self.worker.set_loss_fn(loss_of(trainer, algorithm, response_length))

    def old_log_probs(self, batch: Batch) -> Batch:
        """Returns ``old_log_probs`` and ``entropy`` of the current weights, float32 ``[rows, R]``.

        If the advantage estimator needs it, also ``sum_pi_squared``, the sum of all squared probabilities at a token.
        """
        more = ["entropy", "sum_pi_squared"] if self.algorithm.adv_estimator in SUMS_SQUARES else ["entropy"]
        options = {f"calculate_{name}": True for name in more}
        columns = self._infer(self.worker, batch, ["log_probs", *more], **options)
        return batch.like(old_log_probs=columns.pop("log_probs"), **columns)

    def ref_log_probs(self, batch: Batch) -> Batch:
        """Returns ``ref_log_prob``, float32 ``[rows, R]``, of the frozen initial weights.

        Raises:
            ConfigError: the trainer was built without the reference.
        """
        if self.reference is None:
            raise ConfigError("ref_log_probs needs the reference: build the trainer with reference=True.")
        bare = {"no_lora_adapter": True} if self.adapted else {}
        columns = self._infer(self.reference, batch, ["log_probs"], calculate_entropy=False, **bare)
        return batch.like(ref_log_prob=columns["log_probs"])

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        """Takes one optimizer step on all rows that have a token to train on.

        If none has, no step is taken: weights and optimizer stay bit for bit, and only the LR scheduler may step.

        Args:
            batch: columns of the responses, ``advantages``; ``old_log_probs``, or ``rollout_log_probs`` with
                ``bypass_mode``; ``ref_log_prob`` for the KL loss; ``rollout_is_weights`` (optional) for the
                correction; ``entropy`` (optional) is only reported.
            last: whether it is the last one of the training step, after which the LR scheduler steps.

        Returns:
            verl's metrics, the same on every rank; ``actor/lr`` is the learning rate of this step. If no step was
            taken, as none has or the gradient is not finite, only this rate and ``actor/skipped_updates``, which is 1.
        """
        from verl.trainer.ppo.core_algos import agg_loss

        trainable = self._trainable(batch)
        if trainable is None:
            return self._skip(last)
        batch = trainable
        more = ["advantages"]
        more += ["ref_log_prob"] if self.algorithm.use_kl_loss else []
        more += ["rollout_is_weights"] if "rollout_is_weights" in batch else []
        old = "rollout_log_probs" if self.algorithm.bypass_mode else "old_log_probs"
        entropy = self.algorithm.entropy_coeff != 0 or "entropy" not in batch
        inputs = inputs_of(batch, *more, old_log_probs=old)
        if "entropy" not in batch:
            metrics = self._step(inputs, last, calculate_entropy=entropy)
            found = metrics.get("actor/entropy_loss")  # not of a step that was skipped
            return metrics if found is None else metrics | {"actor/entropy": found}

        def logged() -> dict[str, float]:
            mean = agg_loss(
                loss_mat=batch["entropy"],
                loss_mask=batch["response_mask"],
                loss_agg_mode=self.algorithm.loss_agg_mode,
            )
            return {"actor/entropy": mean.item()}

        return self._step(inputs, last, logged, calculate_entropy=entropy)

    def export(self, directory: str, card: str) -> None:
        """Writes the weights as a Hugging Face directory, replacing one that exists; all ranks must call."""
        weights = self.weights()
        if self.rank == 0:
            write_model(weights, self._model, Path(directory), card, replace=True)
