"""Sizes of a model, from its config.json alone: what it and its KV cache take of a GPU's memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import ModelError, NotChecked
from dataflow.models.directory import headers, read_json

_BIASED = ("qwen2", "qwen2_moe")
"""Types whose queries, keys and values have a bias whatever their configuration says."""
_NORMED = ("qwen3", "qwen3_moe")
"""Types that normalise queries and keys."""


@dataclass(frozen=True)
class Size:
    """Sizes of a causal language model.

    Attributes:
        parameters: weights, tied ones once.
        embeddings: those of them that are no layer's: embedding and head.
        layers: number of layers.
        hidden: width of the layers.
        intermediate: width of their feed-forward part, for one token.
        vocabulary: number of token ids.
        cached: numbers in the KV cache for a token.
    """

    parameters: int
    embeddings: int
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int
    cached: int

    @property
    def layer(self) -> int:
        """Weights of one layer."""
        return (self.parameters - self.embeddings) // self.layers


def count(path: Path) -> int:
    """Returns the number of weights in a model's files; raises as :func:`~dataflow.models.directory.headers` does."""
    return sum(math.prod(shape) for shape in headers(path).values())


def size_of(path: str | Path) -> Size:
    """Returns the sizes of a model from its configuration; its weights need not be there.

    Raises:
        ModelError: the configuration cannot be read.
        NotChecked: it does not have the keys that a decoder of the usual form has.
    """
    whole = read_json(Path(path), "config.json")
    inner = whole.get("text_config")
    of: Mapping[str, Any] = inner if isinstance(inner, dict) else whole

    def number(*keys: str, default: int | None = None) -> int:
        for key in keys:
            if type(value := of.get(key)) is int and value > 0:
                return value
        if default is None:
            raise NotChecked(f"config.json of {path} has no {keys[0]}, from which the memory could be estimated")
        return default

    hidden, layers, heads = number("hidden_size"), number("num_hidden_layers"), number("num_attention_heads")
    vocabulary, wide = number("vocab_size"), number("intermediate_size")
    groups, head = number("num_key_value_heads", default=heads), number("head_dim", default=hidden // heads)
    experts = number("num_local_experts", "num_experts", default=0) if _has_experts(of) else 0
    wide = number("moe_intermediate_size", default=wide) if experts else wide
    used = number("num_experts_per_tok", default=1) if experts else 1
    kind = str(of.get("model_type", whole.get("model_type", "")))
    projected = (heads + 2 * groups) * head
    attention = hidden * projected + heads * head * hidden
    attention += projected if kind in _BIASED or of.get("attention_bias") else 0
    attention += 2 * head if kind in _NORMED else 0
    forward = 3 * hidden * wide * max(1, experts) + hidden * experts
    tied = whole.get("tie_word_embeddings", of.get("tie_word_embeddings", False))
    embeddings = vocabulary * hidden * (1 if tied else 2)
    parameters = layers * (attention + forward + 2 * hidden) + hidden + embeddings
    with contextlib.suppress(ModelError):  # of weights that are there, the headers say more, such as shared experts
        parameters = max(parameters, count(Path(path)))
    return Size(parameters, embeddings, layers, hidden, wide * used, vocabulary, 2 * layers * groups * head)


def _has_experts(of: Mapping[str, Any]) -> bool:
    return any(type(of.get(key)) is int for key in ("num_local_experts", "num_experts"))
