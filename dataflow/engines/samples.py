"""Makes a Batch of the samples of a rollout engine, the same for every engine."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dataflow.batch import Batch
from dataflow.columns import Ragged, Texts
from dataflow.engines.base import Sample
from dataflow.errors import DataflowError


def seed_of(*parts: int) -> int:
    """Returns a seed below 2**63 that depends only on these numbers, and is the same in every process.

    >>> seed_of(1, 2) == seed_of(1, 2) != seed_of(2, 1)
    True
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


SHOWN = "multi_modal_inputs"
"""The column of what prompts show beside their text: objects with ``inputs`` and ``positions``, one for each row."""


def with_shown(places: torch.Tensor, shown: Sequence[Any], wide: int) -> torch.Tensor:
    """Returns the positions of tokens for a model that takes images, in verl's four rows, ``[rows, 4, wide + R]``.

    They are the places in the text, ``[rows, wide + R]``, then time, height and width. For a prompt, left-padded to
    ``wide`` tokens, these are the ``positions`` of what it shows; a response counts on from the largest one.
    """
    found = places[:, None].repeat(1, 4, 1)
    for row, one in enumerate(shown):
        tokens = one.positions.shape[1]
        found[row, 1:, wide - tokens : wide] = one.positions
        found[row, 1:, wide:] += one.positions.max() + 1 - tokens
    return found


def to_batch(prompts: Batch, samples: Sequence[Sample], length: int, tokenizer: Any, pad: int) -> Batch:
    """Returns samples as rows, see :meth:`~dataflow.engines.base.RolloutEngine.batch`, padded with ``pad``.

    Raises DataflowError if the samples do not fit together, or one is longer than ``length``.
    """
    if not samples:
        raise DataflowError("rollout: no sample to make a batch of.")
    rows, owner, n = _in_order(prompts, samples)
    after = np.array([len(sample.tokens) for sample in rows])
    if after.max() > length:
        raise DataflowError(f"rollout: a response has {after.max()} tokens, more than the {length} there is room for.")
    _check_lengths(rows, after)
    # Padded to the longest of all prompts, so that the batches of one rollout can be concatenated.
    given = [np.asarray(ids, dtype=np.int32) for ids in prompts["prompt_ids"]]
    wide = max(map(len, given))
    asked = [given[at] for at in owner.tolist()]
    drawn = [np.asarray(sample.tokens, dtype=np.int32) for sample in rows]
    before = np.array(list(map(len, given)))[owner]
    both, first = before + after, wide - before
    whole = wide + length
    tokens = np.concatenate([*itertools.chain.from_iterable(zip(asked, drawn, strict=True))])
    log_probs = np.concatenate([np.asarray(sample.log_probs, dtype=np.float32) for sample in rows])
    counted = np.arange(both.max(), dtype=np.min_scalar_type(both.max()))
    places = np.concatenate([counted[:size] for size in both.tolist()])
    none, begins, drawn_at = np.zeros_like(after), np.cumsum(both) - both, np.cumsum(after) - after
    integers = np.dtype(np.int64)
    columns: dict[str, Any] = {
        # Three matrices of the same tokens.
        "prompts": Ragged(tokens, begins, before, first, wide, integers, pad),
        "responses": Ragged(tokens, begins + before, after, none, length, integers, pad),
        "input_ids": Ragged(tokens, begins, both, first, whole, integers, pad),
        "attention_mask": Ragged(np.ones(len(tokens), np.int8), begins, both, first, whole, integers),
        "position_ids": Ragged(places, begins, both, first, whole, integers),
        "response_mask": Ragged(_mask(rows, after), drawn_at, after, none, length, integers),
        "rollout_log_probs": Ragged(log_probs, drawn_at, after, none, length, log_probs.dtype),
    }
    if SHOWN in prompts:
        shown = prompts[SHOWN]
        columns["position_ids"] = with_shown(columns["position_ids"].read(), [shown[at] for at in owner.tolist()], wide)
    columns["response_text"] = _texts(rows, tokenizer)
    columns["finish_reason"] = [sample.finish for sample in rows]
    ids = prompts.ids
    mine = prompts.select([ids[at] for at in owner[::n].tolist()])
    repeated = mine.only(*(name for name in mine.names if name != "prompt_ids")).repeat(n)
    names = dict.fromkeys(name for sample in rows for name in sample.facts or ())
    facts = {name: [(sample.facts or {}).get(name) for sample in rows] for name in names}
    found = repeated.merge(repeated.like(**facts, **columns))
    found.meta["weights_version"] = min(sample.version for sample in rows)
    return found


def _mask(rows: Sequence[Sample], tokens: np.ndarray) -> np.ndarray:
    """Returns the mask of the responses' tokens, int8, one response after another."""
    mask = np.ones(int(tokens.sum()), np.int8)
    for sample, end in zip(rows, np.cumsum(tokens).tolist(), strict=True):
        if sample.mask is not None:
            mask[end - len(sample.mask) : end] = sample.mask
    return mask


def _in_order(prompts: Batch, samples: Sequence[Sample]) -> tuple[list[Sample], np.ndarray, int]:
    """Returns samples in the order of the prompts and of their groups, the prompt of each, and the size of a group."""
    place = {group: at for at, group in enumerate(prompts.ids)}
    owner, index = (np.array(each) for each in zip(*((place[s.group], s.index) for s in samples), strict=True))
    order = np.lexsort((index, owner))
    owner, index = owner[order], index[order]
    groups = 1 + int(np.count_nonzero(np.diff(owner)))
    n, odd = divmod(len(samples), groups)
    if odd or (owner != np.repeat(owner[::n], n)).any() or (index != np.tile(np.arange(n), groups)).any():
        raise DataflowError(f"rollout: {len(samples)} samples do not fill {groups} groups alike.")
    return [samples[at] for at in order.tolist()], owner, n


def _check_lengths(rows: Sequence[Sample], tokens: np.ndarray) -> None:
    """Checks that each sample has as many log-probs, and values of its mask, as tokens."""
    each = {
        "log-probs": [len(sample.log_probs) for sample in rows],
        "values of a mask": [len(sample.tokens if sample.mask is None else sample.mask) for sample in rows],
    }
    for what, counts in each.items():
        for at in np.flatnonzero(np.array(counts) != tokens).tolist():
            raise DataflowError(
                f"rollout: sample {rows[at].index} of group {rows[at].group} has {counts[at]} {what} for "
                f"{tokens[at]} tokens; its engine must return one for each."
            )


def _texts(rows: Sequence[Sample], tokenizer: Any) -> Texts:
    """Returns the text of each sample; writes those that are not written yet."""
    left = [list(map(int, sample.tokens)) for sample in rows if sample.text is None]
    written = iter(tokenizer.batch_decode(left, skip_special_tokens=True) if left else ())
    return Texts.of([next(written) if sample.text is None else sample.text for sample in rows])
