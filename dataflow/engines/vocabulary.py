"""Vocabulary: a model's tokenizer, and the tokens that end and pad responses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataflow.errors import ModelError


@dataclass(frozen=True)
class Vocabulary:
    """A model's vocabulary.

    Attributes:
        tokenizer: transformers'.
        ends: ids that end a response.
        pad: the id to pad with.
        size: number of token ids.
    """

    tokenizer: Any
    ends: list[int]
    pad: int
    size: int

    def text(self, tokens: Sequence[int]) -> str:
        """Returns the text of a response, without special tokens."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def undrawn(config: Any) -> list[int]:
    """Returns the tokens that no response may have: each stands for a part of an image, as the trainer reads it."""
    names = ("image_token_id", "video_token_id") if hasattr(config, "vision_config") else ()
    return [int(getattr(config, name)) for name in names]


@contextlib.contextmanager
def loading(model: str) -> Iterator[None]:
    """Turns errors of reading a model's files into one sentence.

    Raises:
        ModelError: the directory does not exist, or a file in it cannot be read.
    """
    # transformers takes a missing path for a hub id and queries the hub for a minute.
    if (model.startswith(("/", ".", "~")) or model.count("/") > 1) and not Path(model).is_dir():
        raise ModelError(f"model directory '{model}' does not exist.")
    try:
        yield
    except (OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"model '{model}' cannot be loaded: {reason}") from error


def read_vocabulary(model: str) -> tuple[Vocabulary, Any]:
    """Returns a model's vocabulary and its configuration, without its weights.

    Raises:
        ModelError: they cannot be read, or no token ends a response.
    """
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    with loading(model):
        tokenizer = AutoTokenizer.from_pretrained(model)
        config = AutoConfig.from_pretrained(model)
    text = config.get_text_config()
    sources: list[Any] = [tokenizer, text]
    with contextlib.suppress(OSError):  # a model need not have one
        sources.insert(1, GenerationConfig.from_pretrained(model))
    ids = [getattr(source, "eos_token_id", None) for source in sources]
    ends = [end for each in ids for end in (each if isinstance(each, list) else [each]) if end is not None]
    if not ends:
        raise ModelError(f"model '{model}' names no eos_token_id; set it in its generation_config.json.")
    pad = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return Vocabulary(tokenizer, list(dict.fromkeys(ends)), pad, int(text.vocab_size)), config
