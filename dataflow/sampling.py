"""How a run samples: from its configuration to what the rollout engine is told, for training and for validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dataflow.engines.base import Sampling
from dataflow.errors import ConfigError, nearest


def sampling_of(config: Any) -> tuple[Sampling, Sampling]:
    """Returns the sampling of training, and that of the held-out problems.

    Args:
        config: a :class:`~dataflow.config.RunConfig`; while it has no model yet, stop tokens are left out.

    Raises:
        ConfigError: a stop token that the model's tokenizer does not know.
    """
    draw = config.engine
    sampling = Sampling(
        n=draw.n,
        temperature=draw.temperature,
        top_p=draw.top_p,
        top_k=draw.top_k,
        max_tokens=draw.max_tokens,
        min_p=draw.min_p,
        repetition_penalty=draw.repetition_penalty,
        stop_token_ids=_stop_ids(config.model.path, tuple(draw.stop)) if draw.stop and config.model.path else (),
    )
    plain = Sampling(max_tokens=draw.max_tokens, stop_token_ids=sampling.stop_token_ids)
    return sampling, replace(plain, n=config.val.n, temperature=config.val.temperature)


def _stop_ids(model: str, stop: Sequence[str]) -> tuple[int, ...]:
    from dataflow.data.prompts import load_tokenizer

    vocabulary = load_tokenizer(model).get_vocab()
    for token in stop:
        if token not in vocabulary:
            special = [name for name in vocabulary if name.startswith("<")]
            raise ConfigError(
                f"engine.stop: the tokenizer has no token '{token}'{nearest(token, special) or '.'} "
                "Give single tokens as it writes them, such as '<|im_end|>'."
            )
    return tuple(vocabulary[token] for token in stop)
