"""Loads tokenizers."""

from __future__ import annotations

from typing import Any

from dataflow.errors import ConfigError, DataflowError


def load_tokenizer(path: str, where: str, kind: type[DataflowError] = ConfigError) -> Any:
    """Returns the tokenizer in a model's directory.

    Args:
        path: of the directory.
        where: the setting that names it; begins the error.
        kind: of the error.

    Raises:
        DataflowError: of that kind; the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    # The parser of a broken file may raise any exception; that of tokenizers raises plain Exceptions.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise kind(f"{where}: no tokenizer can be loaded from {path} ({reason}).") from error
