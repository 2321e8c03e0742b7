"""What the stages ask of an engine. A rollout engine samples, a trainer scores and updates; both hold weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from dataflow.batch import Batch


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn.

    Attributes:
        n: responses per prompt.
        temperature: 0 is greedy.
        top_p: nucleus mass kept, 1.0 keeps all.
        top_k: most likely tokens kept, -1 or 0 keeps all.
        max_tokens: longest response, eos included.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 24


class RolloutEngine(Protocol):
    """Samples responses from its own copy of the actor weights."""

    version: int
    """Version of the weights it holds: 0 at the start, n after step n's sync."""

    def generate(self, prompts: Batch, sampling: Sampling, seed: int) -> Batch:
        """Samples ``sampling.n`` responses for every prompt.

        Args:
            prompts: a row per prompt, with a column ``prompt_ids`` (lists of token ids) and any others.
            sampling: how to draw.
            seed: sample i of group g is drawn with a generator seeded from (seed, g, i), so that a sample does
                not depend on what else is in the batch or in which order it ends.

        Returns:
            ``rows = prompts x n``, the samples of a group side by side, the other columns of ``prompts`` repeated:
            ``prompts`` int64 ``[rows, P]``, left-padded to the batch's longest; ``responses`` int64 ``[rows, R]``,
            right-padded; ``input_ids``, ``attention_mask``, ``position_ids`` int64 ``[rows, P+R]``;
            ``response_mask`` int64 ``[rows, R]``, 1 up to and including eos; ``rollout_log_probs`` float32
            ``[rows, R]``, 0 behind the end, of the model's distribution at the sampling temperature (at 1 when
            greedy), before top_p and top_k; ``response_text`` (str, without special tokens).
            ``meta["weights_version"]`` is ``version``.
        """
        ...

    def sync(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Takes over new weights, by parameter name as the Hugging Face model names them."""
        ...


class Trainer(Protocol):
    """The trained actor: one object per rank, all of which make the same calls (SPMD).

    Every rank is given the whole batch and takes its own share of the rows; results come back whole on rank 0
    (and may on the others).
    """

    def old_log_probs(self, batch: Batch) -> Batch:
        """Returns ``old_log_probs`` float32 ``[rows, R]`` (and ``entropy`` if asked for) of the present weights."""
        ...

    def ref_log_probs(self, batch: Batch) -> Batch:
        """Returns ``ref_log_prob`` float32 ``[rows, R]`` of the frozen initial weights."""
        ...

    def update(self, batch: Batch, *, last: bool) -> dict[str, float]:
        """Takes one optimizer step on all rows; ``last`` says it is the step's last one (LR scheduler steps).

        Rows with an empty ``response_mask`` (samples that were dropped) have no part in it; if no row has one, no step
        is taken.

        Returns:
            verl's metrics: ``actor/pg_loss``, ``actor/grad_norm``, ``actor/lr``, ...; ``actor/skipped_updates`` is 1
            where no step was taken.
        """
        ...

    def weights(self) -> dict[str, torch.Tensor]:
        """Returns the full weights on CPU, by Hugging Face parameter name, tied ones once."""
        ...

    def close(self) -> Any: ...
