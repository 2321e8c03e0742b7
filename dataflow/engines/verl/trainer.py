"""What verl trains or holds: the actor, the critic of PPO, and the teacher of a distillation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dataflow.algorithms import SUMS_SQUARES
from dataflow.batch import Batch
from dataflow.engines.verl.export import write_model
from dataflow.engines.verl.loss import loss_of, value_loss_of
from dataflow.engines.verl.model import TrainedModel
from dataflow.engines.verl.process import quiet


class VerlTrainer(TrainedModel):
    """Trains the actor; implements the Trainer Protocol. RANK, WORLD_SIZE, ... come from the environment.

    Args:
        model: directory or Hugging Face id of a causal LM.
        trainer: section ``trainer``, a :class:`~dataflow.config.run.TrainerConfig`.
        algorithm: the options of section ``algorithm`` that the loss reads
            (:func:`dataflow.engines.verl.loss.loss_of`), and adv_estimator.
        total_steps: training steps of the run.
        response_length: longest response, in tokens; what ``seq-mean-token-sum-norm`` divides by.
        reference: whether ``ref_log_probs`` is needed: the frozen initial weights are held as well, unless those beside
            a LoRA adapter are they.
        **options: ``temperature``, ``seed``, ``device``, ``shares_gpu`` of :class:`TrainedModel`.

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
        *,
        reference: bool = False,
        **options: Any,
    ) -> None:
        self.algorithm, self.loss_agg_mode = algorithm, algorithm.loss_agg_mode
        super().__init__(
            model,
            trainer,
            total_steps=total_steps,
            threads=trainer.threads,
            max_tokens=trainer.max_tokens_per_gpu,
            balance=trainer.balance_batch,
            **options,
        )
        self.reference = self.worker if reference and self.adapted else None
        if reference and self.reference is None:
            with quiet():
                # A second copy of the weights, which is never trained.
                self.reference = self._build(offload=options.get("device") == "cuda")
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
        """Returns ``ref_log_prob``, float32 ``[rows, R]``, of the frozen initial weights; needs ``reference``."""
        bare = {"no_lora_adapter": True} if self.adapted else {}
        columns = self._infer(self.reference, batch, ["log_probs"], calculate_entropy=False, **bare)
        return batch.like(ref_log_prob=columns["log_probs"])

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        """Takes one optimizer step on all rows that have a token to train on; see :meth:`TrainedModel._update`.

        Args:
            batch: columns of the responses, ``advantages``; ``old_log_probs``, or ``rollout_log_probs`` with
                ``bypass_mode``; ``ref_log_prob`` for the KL loss; ``rollout_is_weights`` (optional) for the
                correction; ``entropy`` (optional) is only reported.
            last: whether it is the last one of the training step, after which the LR scheduler steps.

        Returns:
            verl's metrics, the same on every rank.
        """
        old = "rollout_log_probs" if self.algorithm.bypass_mode else "old_log_probs"
        columns = {"advantages": "advantages", "old_log_probs": old}
        if self.algorithm.use_kl_loss:
            columns["ref_log_prob"] = "ref_log_prob"
        if "rollout_is_weights" in batch:
            columns["rollout_is_weights"] = "rollout_is_weights"
        if "entropy" in batch:
            again = self.algorithm.entropy_coeff != 0
            return self._update(batch, last, columns, self._entropy, calculate_entropy=again)
        metrics = self._update(batch, last, columns, calculate_entropy=True)
        found = metrics.get("actor/entropy_loss")  # not of a step that was skipped
        return metrics if found is None else metrics | {"actor/entropy": found}

    def _entropy(self, batch: Batch) -> dict[str, float]:
        from verl.trainer.ppo.core_algos import agg_loss

        mean = agg_loss(loss_mat=batch["entropy"], loss_mask=batch["response_mask"], loss_agg_mode=self.loss_agg_mode)
        return {"actor/entropy": mean.item()}

    def export(self, directory: str, card: str) -> None:
        """Writes the weights as a Hugging Face directory, replacing one that exists; all ranks must call."""
        weights = self.weights()
        if self.rank == 0:
            write_model(weights, self._model, Path(directory), card, replace=True)


class VerlCritic(TrainedModel):
    """Estimates the return of each token; implements the Critic Protocol. RANK, ... come from the environment.

    It begins with the body of a causal LM; its head is new, drawn from ``seed``.
    """

    name = "critic"

    def __init__(self, model: str, critic: Any, total_steps: int, **options: Any) -> None:
        super().__init__(model, critic, valued=True, total_steps=total_steps, **options)
        self.loss_agg_mode = critic.loss_agg_mode
        self.worker.set_loss_fn(value_loss_of(critic))

    def values(self, batch: Batch) -> Batch:
        """Returns ``values``, float32 ``[rows, R]``: the return expected before each token; 0 where the mask is."""
        return batch.like(**self._infer(self.worker, batch, ["values"]))

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        """Takes one optimizer step on all rows that have a token to train on; see :meth:`TrainedModel._update`.

        It reads ``returns`` and ``values``, those that the advantages were made of: predictions are clipped around
        them.
        """
        return self._update(batch, last, {"values": "values", "returns": "returns"})


class VerlTeacher(TrainedModel):
    """Scores tokens, and is never trained: the optimizer that verl builds with it holds no memory before a step."""

    name = "teacher"

    def log_probs(self, batch: Batch) -> Batch:
        """Returns ``teacher_log_probs``, float32 ``[rows, R]``, of the responses' tokens; 0 where the mask is."""
        columns = self._infer(self.worker, batch, ["log_probs"], calculate_entropy=False)
        return batch.like(teacher_log_probs=columns["log_probs"])
