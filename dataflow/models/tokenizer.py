"""Loads tokenizers, and sets the options of their chat templates."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
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


def with_options(tokenizer: Any, options: Mapping[str, Any] | None) -> Any:
    """Returns the tokenizer, which now renders with these options of its chat template.

    Raises:
        ConfigError: an option is an argument that the run itself gives.
    """
    if not options:
        return tokenizer
    own = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters} - {"documents", "kwargs"}
    if taken := sorted(own.intersection(options)):
        raise ConfigError(
            f"data.apply_chat_template_kwargs.{taken[0]}: the run itself says how a chat is rendered; give only what "
            "the model's chat template reads, such as enable_thinking."
        )
    tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)
    return tokenizer
