"""Checks the input of a rollout engine, and makes a Batch of its samples. The same for every engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dataflow.batch import Batch
from dataflow.engines.base import Sample, Sampling
from dataflow.errors import ConfigError, DataError, DataflowError


def check_sampling(sampling: Sampling, vocabulary: int) -> None:
    """Checks sampling options that are the same for every engine.

    Args:
        sampling: how to draw.
        vocabulary: number of token ids.

    Raises:
        ConfigError: a value is out of range.
    """
    ranges = (
        ("n", sampling.n >= 1, "1 or more"),
        ("max_tokens", sampling.max_tokens >= 1, "1 or more"),
        ("temperature", sampling.temperature >= 0, "0 (greedy) or more"),
        ("top_p", 0 < sampling.top_p <= 1, "a number above 0, up to 1"),
        ("top_k", sampling.top_k >= -1, "-1 or 0 (all) or more"),
        ("min_p", 0 <= sampling.min_p <= 1, "a number from 0 to 1"),
        ("repetition_penalty", sampling.repetition_penalty > 0, "a number above 0"),
    )
    for name, good, wanted in ranges:
        if not good:
            raise ConfigError(f"rollout: {name}={getattr(sampling, name)}; give {wanted}.")
    unknown = [token for token in sampling.stop_token_ids if not 0 <= token < vocabulary]
    if unknown:
        raise ConfigError(
            f"rollout: stop_token_ids has {unknown[0]}, which the tokenizer lacks (it has {vocabulary} tokens)."
        )


def prompt_ids(prompts: Batch, longest: int, where: str = "data.max_prompt_length") -> list[list[int]]:
    """Returns the token ids of each prompt.

    Args:
        prompts: a row per prompt, with a column ``prompt_ids``.
        longest: the maximum number of tokens of a prompt.
        where: the configuration key that sets it, for error messages.

    Raises:
        DataError: there is no prompt, or one is empty or too long.
        DataflowError: a group has more than one prompt.
    """
    ids = [[int(token) for token in prompt] for prompt in prompts["prompt_ids"]]
    if not ids:
        raise DataflowError("rollout: the batch holds no prompt.")
    if len(prompts.ids) != len(ids):
        raise DataflowError(f"rollout: {len(ids)} prompts in {len(prompts.ids)} groups; give one prompt a group.")
    for group, prompt in zip(prompts.ids, ids, strict=True):
        if not prompt:
            raise DataError(f"rollout: the prompt of group {group} is empty.")
        if len(prompt) > longest:
            raise DataError(
                f"rollout: the prompt of group {group} has {len(prompt)} tokens, more than {where}={longest}; "
                "raise it, or set data.truncation."
            )
    return ids


def check_tokens(prompts: Batch, ids: Sequence[Sequence[int]], vocabulary: int) -> None:
    """Checks that a model has the tokens of each prompt; some engines would end at an unknown one.

    Args:
        prompts: a row per prompt.
        ids: their token ids.
        vocabulary: number of the model's token ids.

    Raises:
        DataError: it lacks one.
    """
    for group, prompt in zip(prompts.ids, ids, strict=True):
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < vocabulary)
            raise DataError(
                f"rollout: the prompt of group {group} has token {wrong}; the model has 0 to {vocabulary - 1}. "
                "Is it from another tokenizer?"
            )


def seed_of(*parts: int) -> int:
    """Returns a seed below 2**63 that depends only on these numbers, and is the same in every process.

    >>> seed_of(1, 2) == seed_of(1, 2) != seed_of(2, 1)
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def left_pad(ids: Sequence[Sequence[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns token ids and mask, int64 ``[len(ids), longest]``."""
    wide = max(map(len, ids))
    tokens = torch.full((len(ids), wide), pad, dtype=torch.int64)
    mask = torch.zeros((len(ids), wide), dtype=torch.int64)
    for row, prompt in enumerate(ids):
        tokens[row, wide - len(prompt) :] = torch.tensor(prompt)
        mask[row, wide - len(prompt) :] = 1
    return tokens, mask


SHOWN = "multi_modal_inputs"
"""The column of what prompts show beside their text: objects with ``inputs`` and ``positions``, one for each row."""


def shown_of(prompts: Batch, sees: bool) -> list[Any]:
    """Returns what each prompt shows; None for a model of text.

    Args:
        prompts: a row per prompt.
        sees: whether the model takes images.

    Raises:
        DataError: the model takes images, and the prompts have no positions in them.
    """
    if sees and SHOWN not in prompts:
        raise DataError(
            f"rollout: the model takes images, but the prompts have no column {SHOWN!r}; make them with "
            "dataflow.data.prompts."
        )
    return list(prompts[SHOWN]) if sees else [None] * len(prompts)


def check_turn(sees: bool) -> None:
    """Checks that an engine can sample a turn of a conversation.

    Raises:
        ConfigError: its model takes images.
    """
    if sees:
        raise ConfigError(
            "rollout: conversations cannot show images yet; leave out the tools, or give a model of text."
        )


def with_shown(places: torch.Tensor, shown: Sequence[Any], wide: int) -> torch.Tensor:
    """Returns the positions of tokens for a model that takes images, in verl's four rows.

    Args:
        places: of the tokens in the text, int64 ``[rows, wide + R]``.
        shown: what the prompt of each row shows; ``positions`` int64 ``[3, tokens]`` are those of its own tokens.
        wide: the length that prompts are left-padded to.

    Returns:
        int64 ``[rows, 4, wide + R]``: the places, then time, height and width, which a response counts on from the
        largest one of its prompt.
    """
    found = places[:, None].repeat(1, 4, 1)
    for row, one in enumerate(shown):
        tokens = one.positions.shape[1]
        found[row, 1:, wide - tokens : wide] = one.positions
        found[row, 1:, wide:] += one.positions.max() + 1 - tokens
    return found


def to_batch(prompts: Batch, samples: Sequence[Sample], length: int, tokenizer: Any, pad: int) -> Batch:
    """Returns samples as rows, see :meth:`~dataflow.engines.base.RolloutEngine.batch`.

    Args:
        prompts: holds their prompts.
        samples: all of each group.
        length: R, tokens that responses are padded to.
        tokenizer: writes ``response_text``.
        pad: the token to pad with.

    Raises:
        DataflowError: there is no sample, groups differ in size, or a response is longer than ``length``.
    """
    if not samples:
        raise DataflowError("rollout: no sample to make a batch of.")
    place = {group: at for at, group in enumerate(prompts.ids)}
    rows = sorted(samples, key=lambda sample: (place[sample.group], sample.index))
    groups = list(dict.fromkeys(sample.group for sample in rows))
    n, odd = divmod(len(rows), len(groups))
    if odd or [(s.group, s.index) for s in rows] != [(g, i) for g in groups for i in range(n)]:
        raise DataflowError(f"rollout: {len(rows)} samples do not fill {len(groups)} groups alike.")
    longest = max(len(sample.tokens) for sample in rows)
    if longest > length:
        raise DataflowError(f"rollout: a response has {longest} tokens, more than the {length} there is room for.")
    # Padded to the longest of all prompts, so that the batches of one rollout can be concatenated.
    padded, prompt_mask = left_pad([[int(t) for t in ids] for ids in prompts["prompt_ids"]], pad)
    owner = torch.tensor([place[sample.group] for sample in rows])
    padded, prompt_mask = padded[owner], prompt_mask[owner]
    responses = np.full((len(rows), length), pad, dtype=np.int64)
    there = np.zeros((len(rows), length), dtype=np.int64)
    drawn = np.zeros((len(rows), length), dtype=np.int64)
    log_probs = np.zeros((len(rows), length), dtype=np.float32)
    for row, sample in enumerate(rows):
        end = len(sample.tokens)
        responses[row, :end], there[row, :end], log_probs[row, :end] = sample.tokens, 1, sample.log_probs
        drawn[row, :end] = 1 if sample.mask is None else sample.mask
    attention = torch.cat([prompt_mask, torch.from_numpy(there)], dim=1)
    places = (attention.cumsum(dim=1) - 1).clamp(min=0)
    if SHOWN in prompts:
        places = with_shown(places, [prompts[SHOWN][at] for at in owner.tolist()], padded.shape[1])
    mine = prompts.select(groups)
    repeated = mine.like(**{name: column for name, column in mine.columns.items() if name != "prompt_ids"}).repeat(n)
    names = dict.fromkeys(name for sample in rows for name in sample.facts or ())
    return Batch(
        repeated.groups,
        repeated.columns
        | {name: [(sample.facts or {}).get(name) for sample in rows] for name in names}
        | {
            "prompts": padded,
            "responses": torch.from_numpy(responses),
            "input_ids": torch.cat([padded, torch.from_numpy(responses)], dim=1),
            "attention_mask": attention,
            "position_ids": places,
            "response_mask": torch.from_numpy(drawn),
            "rollout_log_probs": torch.from_numpy(log_probs),
            "response_text": tokenizer.batch_decode([list(s.tokens) for s in rows], skip_special_tokens=True),
        },
        {**prompts.meta, "weights_version": min(sample.version for sample in rows)},
    )
