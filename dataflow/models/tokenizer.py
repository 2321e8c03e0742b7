"""Tokenizers: loaded with their chat template's options; prompts as token ids; whether two count the same tokens."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import ConfigError, DataflowError, ModelError
from dataflow.files import sha256_of

_TEXTS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Ends of the names of a model's files beside its weights, of which trainers check the content themselves."""


def load_tokenizer(path: str, where: str, kind: type[DataflowError] = ConfigError) -> Any:
    """Returns the tokenizer in a model's directory, which the setting ``where`` names; errors are of that ``kind``."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    # The parser of a broken file may raise any exception; that of tokenizers raises plain Exceptions.
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise kind(f"{where}: no tokenizer can be loaded from {path} ({reason}).") from error


def load_chat_tokenizer(path: str, options: Mapping[str, Any] | None = None) -> Any:
    """Returns the tokenizer of the model to train; all that it renders has these options of its template."""
    tokenizer = load_tokenizer(path, "model.path", ModelError)
    if not tokenizer.chat_template:
        raise ModelError(f"model.path={path}: its tokenizer has no chat template; use an instruct model or add one.")
    return with_options(tokenizer, options)


def with_options(tokenizer: Any, options: Mapping[str, Any] | None) -> Any:
    """Returns the tokenizer, which now renders with these options of its chat template."""
    if options:
        tokenizer.apply_chat_template = functools.partial(tokenizer.apply_chat_template, **options)
    return tokenizer


def prompt_ids(tokenizer: Any, chat: Sequence[Any], schemas: Sequence[Mapping[str, Any]] | None = None) -> list[Any]:
    """Returns a chat's token ids up to where the model's answer begins; of several chats those of each, on all cores.

    ``schemas`` are the JSON schemas of the tools to describe.
    """
    tools = {"tools": list(schemas)} if schemas else {}
    render = tokenizer.apply_chat_template
    return list(render(list(chat), add_generation_prompt=True, tokenize=True, return_dict=False, **tools))


def tokenizer_sha256(model: str) -> str:
    """Returns the SHA-256 of all files of a model's directory that say how it reads and writes texts and images."""
    found = hashlib.sha256()
    for file in sorted(Path(model).iterdir()):
        if file.suffix in _TEXTS and not file.name.endswith(".index.json") and file.is_file():
            found.update(f"{file.name} {sha256_of(file)}\n".encode())
    return found.hexdigest()


def check_same_tokens(actor: str, other: str, key: str) -> None:
    """Checks that two models count the same tokens, so that one can read what the other samples.

    Raises:
        ModelError: a tokenizer cannot be loaded, or the two differ; with a token that does.
    """
    mine = load_tokenizer(actor, "model.path", ModelError).get_vocab()
    theirs = load_tokenizer(other, key, ModelError).get_vocab()
    if odd := sorted(token for token in {*mine, *theirs} if mine.get(token) != theirs.get(token)):
        raise ModelError(
            f"{key}={other}: its tokenizer is not that of model.path={actor} (they differ in {len(odd)} tokens, such "
            f"as {odd[0]!r}); take a model of the same family."
        )
