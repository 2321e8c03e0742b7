"""Drawing tokens: the random numbers of a sample, and the token for a number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dataflow.engines.base import Sampling


def uniforms(seed: Sequence[int], long: int) -> np.ndarray:
    """Returns the numbers in [0, 1) that decide each token, float64 ``[long]``.

    The t-th number depends on the seed alone, not even on ``long``.
    """
    entropy = [part % 2**64 for part in seed]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy))).random(long)


def draw(
    logits: torch.Tensor, uniform: torch.Tensor, sampling: Sampling, context: torch.Tensor, undrawn: Sequence[int] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each row by inverting the distribution function.

    Args:
        logits: ``[rows, vocabulary]``.
        uniform: numbers in [0, 1), float64 ``[rows]``.
        sampling: how to draw.
        context: tokens of prompt and response so far, int64 ``[rows, tokens]``.
        undrawn: tokens that are never drawn; a cut as the others are, so log-probs count them.

    Returns:
        The tokens int64 ``[rows]``, and their log-probs before any cut float32 ``[rows]``.
    """
    logits = logits.float()
    if sampling.repetition_penalty != 1:
        logits = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(context, logits)
    if sampling.temperature == 0:
        token = _without(logits, undrawn).argmax(dim=-1)
        return token, logits.log_softmax(dim=-1).gather(1, token[:, None]).squeeze(1)
    scaled = logits / sampling.temperature
    cuts = LogitsProcessorList()
    if 0 < sampling.top_k < scaled.shape[-1]:
        cuts.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        cuts.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        cuts.append(MinPLogitsWarper(sampling.min_p))
    cut: Any = cuts(context, _without(scaled, undrawn))
    # In float64, as the error of a float32 sum over 150,000 tokens exceeds the probability of rare tokens.
    mass = cut.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = mass[:, -1:]
    # Strictly below the total, so that the first entry above it is a token of non-zero probability.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    token = torch.searchsorted(mass, target, right=True)
    return token.squeeze(1), scaled.log_softmax(dim=-1).gather(1, token).squeeze(1)


def _without(logits: torch.Tensor, undrawn: Sequence[int]) -> torch.Tensor:
    """Returns the logits, minus infinity for tokens that are never drawn."""
    if not undrawn:
        return logits
    return logits.index_fill(1, torch.tensor(undrawn, device=logits.device), float("-inf"))
