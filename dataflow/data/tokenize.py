"""Chats as token ids: the tokenizer with its chat template, prompts with or without tools, truncation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import ModelError
from dataflow.files import sha256_of
from dataflow.models.tokenizer import load_tokenizer, with_options

DESCRIBED = "tools_described"
"""Set in the meta of a batch of prompts whose token ids already describe the tools."""


_TEXTS = (".json", ".jinja", ".model", ".tiktoken", ".txt")
"""Ends of the names of a model's files beside its weights, of which trainers check the content themselves."""
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
"""Normalizers of tokenizers in Rust that are forms of Unicode, in which ASCII stays as it is."""


def load_chat_tokenizer(path: str, options: Mapping[str, Any] | None = None) -> Any:
    """Loads a tokenizer with a chat template.

    Args:
        path: of the model's directory.
        options: of the template, ``data.apply_chat_template_kwargs``; all that the tokenizer renders has them.

    Raises:
        ModelError: it cannot be loaded, or has no chat template.
        ConfigError: an option is not one of the template.
    """
    tokenizer = load_tokenizer(path, "model.path", ModelError)
    if not tokenizer.chat_template:
        raise ModelError(f"model.path={path}: its tokenizer has no chat template; use an instruct model or add one.")
    return with_options(tokenizer, options)


def tokenizer_sha256(model: str) -> str:
    """Returns the SHA-256 of all files of a model's directory that say how it reads and writes texts and images."""
    found = hashlib.sha256()
    for file in sorted(Path(model).iterdir()):
        if file.suffix in _TEXTS and not file.name.endswith(".index.json") and file.is_file():
            found.update(f"{file.name} {sha256_of(file)}\n".encode())
    return found.hexdigest()


def check_same_tokens(actor: str, other: str, key: str) -> None:
    """Checks that two models count the same tokens, so that one can read what the other samples.

    Args:
        actor, other: directories of the models.
        key: the key that gave the other one.

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


def prompt_ids(
    tokenizer: Any, chat: list[dict[str, str]], schemas: Sequence[Mapping[str, Any]] | None = None
) -> list[int]:
    """Returns a chat's token ids up to where the model's answer begins.

    Args:
        tokenizer: with a chat template.
        chat: messages with ``role`` and ``content``.
        schemas: JSON schemas of the tools to describe; none if empty or None.
    """
    tools = {"tools": list(schemas)} if schemas else {}
    render = tokenizer.apply_chat_template
    return list(render(chat, add_generation_prompt=True, tokenize=True, return_dict=False, **tools))


def texts_of(
    tokenizer: Any, chats: Sequence[list[dict[str, str]]], schemas: Sequence[Mapping[str, Any]] | None = None
) -> list[str]:
    """Returns chats as the texts that the chat template makes of them; arguments as of :func:`prompt_ids`."""
    tools = {"tools": list(schemas)} if schemas else {}
    return list(tokenizer.apply_chat_template(list(chats), add_generation_prompt=True, tokenize=False, **tools))


def encoded(tokenizer: Any, texts: Sequence[str], first: list[int]) -> list[list[int]]:
    """Returns the token ids of texts of :func:`texts_of`, with one call of the tokenizer for all.

    The call is that of transformers' tokenizer in Rust, which uses all cores; transformers' own makes much of each text
    that nothing reads, which takes twice the time.

    Args:
        tokenizer: which has tokenized a chat already, so that it cuts and pads nothing.
        texts: at least one.
        first: the ids of the first text, by :func:`prompt_ids`.

    Raises:
        ValueError: the tokenizer takes one chat at a time.
    """
    backend = tokenizer.backend_tokenizer
    normalizer = backend.normalizer
    try:
        # A text in ASCII has one form only, and finding that takes a seventh of the time.
        if type(normalizer).__name__ in _FORMS and all(map(str.isascii, texts)):
            backend.normalizer = None
        found = [each.ids for each in backend.encode_batch_fast(texts, add_special_tokens=False)]
    finally:
        backend.normalizer = normalizer
    if len(found) != len(texts) or found[0] != first:
        raise ValueError("the tokenizer takes one chat at a time")
    return found


def truncate(ids: list[int], limit: int, side: str) -> list[int]:
    """Returns ``limit`` tokens: the last ones (left), the first ones (right), or both ends (middle).

    >>> truncate([1, 2, 3, 4, 5], 3, "left"), truncate([1, 2, 3, 4, 5], 3, "middle")
    ([3, 4, 5], [1, 4, 5])
    """
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[-(limit - head) :]
