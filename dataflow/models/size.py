"""Sizes of a model, from its config.json alone: what it and its KV cache take of a GPU's memory."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from dataflow.errors import NotChecked
from dataflow.models.directory import headers, read_json


@dataclass(frozen=True)
class Size:
    """Sizes of a causal language model.

    Attributes:
        parameters: weights, tied ones once.
        embeddings: those of them that are no layer's: embedding and head.
        intermediate: width of the layers' feed-forward part, for one token.
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
    """Returns the sizes of a model: transformers builds it without memory for its weights, which need not be there.

    Raises NotChecked if transformers cannot build it, or it is no decoder of the usual form.
    """
    return _built(str(path), repr(read_json(Path(path), "config.json")))


@functools.lru_cache(maxsize=8)
def _built(path: str, _config: str) -> Size:
    import torch
    from transformers import AutoConfig

    from dataflow.engines.pretrained import auto_class

    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
        of = config.get_text_config()
        head = getattr(of, "head_dim", None) or of.hidden_size // of.num_attention_heads
        ends = {id(module.weight): module.weight.numel() for module in (model.get_input_embeddings(), model.lm_head)}
        experts = getattr(of, "num_experts_per_tok", None)
        wide = of.moe_intermediate_size * experts if experts else of.intermediate_size
        return Size(
            parameters=sum(each.numel() for each in model.parameters()),
            embeddings=sum(ends.values()),
            layers=of.num_hidden_layers,
            hidden=of.hidden_size,
            intermediate=wide,
            vocabulary=of.vocab_size,
            cached=2 * of.num_hidden_layers * of.num_key_value_heads * head,
        )
    # For a wrong value, the architecture's own code may raise any exception.
    except Exception as error:
        raise NotChecked(f"the memory of model {path} cannot be estimated ({type(error).__name__}: {error})") from error
