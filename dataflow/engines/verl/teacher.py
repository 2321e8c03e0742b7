"""VerlTeacher: a frozen model that scores what another one samples."""

from __future__ import annotations

from typing import Any

from dataflow.batch import Batch
from dataflow.engines.verl.model import TrainedModel


class VerlTeacher(TrainedModel):
    """Scores tokens, and is never trained: the optimizer that verl builds with it holds no memory before a step.

    Args:
        model: directory of a causal LM.
        options: a :class:`~dataflow.config.training.TrainedConfig`, whose optimizer is not used.
        temperature: that logits are divided by.
        device: "cpu" (gloo) or "cuda" (nccl).
        threads: CPU threads.

    Raises:
        ConfigError: the device is another one.
    """

    name = "teacher"

    def __init__(
        self, model: str, options: Any, temperature: float = 1.0, device: str = "cpu", threads: int = 1
    ) -> None:
        super().__init__(
            model,
            options,
            kind="language_model",
            total_steps=1,
            temperature=temperature,
            seed=0,
            device=device,
            threads=threads,
            shares_gpu=False,
        )

    def log_probs(self, batch: Batch) -> Batch:
        """Returns ``teacher_log_probs``, float32 ``[rows, R]``, of the responses' tokens; 0 where the mask is."""
        columns = self._infer(self.worker, batch, ["log_probs"], calculate_entropy=False)
        return batch.like(teacher_log_probs=columns["log_probs"])
