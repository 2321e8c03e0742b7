"""Rows in the form of verl's engine, and their division among ranks.

    rows 0..n ── divided evenly into world x micro-batches pieces ──▶ rank r takes consecutive pieces
             ◀── outputs are gathered, so that each rank returns all rows

All micro-batches have the same size, as verl requires. If the rows do not divide evenly, a piece is padded with a row
whose response mask is empty: it contributes nothing to loss and gradient, and its outputs are dropped.

verl takes tokens, positions, prompts and responses without padding and returns outputs as jagged as these, so that no
padded matrix of tokens is made.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dataflow.batch import Batch
from dataflow.columns import Ragged
from dataflow.errors import ConfigError, DataflowError

INPUTS = ("input_ids", "attention_mask", "position_ids", "response_mask")
SHOWN = "multi_modal_inputs"
"""The column of what prompts show beside their text."""


def inputs_of(batch: Batch, **more: str) -> Batch:
    """Returns the columns that rows for verl's engine are made of, unread, and others; see :meth:`Batch.only`."""
    return batch.only(*INPUTS, *([SHOWN] if SHOWN in batch else []), **more)


@dataclass(frozen=True)
class Spans:
    """Where the responses lie in rows without padding.

    ``tokens`` are those of each row, prompt included; ``responses`` the tokens of each response; ``room`` is R, tokens
    that responses are padded to.
    """

    tokens: np.ndarray
    responses: np.ndarray
    room: int

    @staticmethod
    def in_batch(batch: Batch) -> Spans:
        """Returns the spans of a batch's rows, without reading a column."""
        room = batch.shape("response_mask")[1]
        return Spans(batch.nonzero("attention_mask"), batch.nonzero("attention_mask", room), room)

    def places(self) -> torch.Tensor:
        """Returns the places of the outputs for the responses' tokens: each is predicted at the token before it."""
        begins = np.cumsum(self.tokens) - self.responses - 1
        shift = begins - (np.cumsum(self.responses) - self.responses)
        return torch.from_numpy(np.arange(int(self.responses.sum())) + np.repeat(shift, self.responses))

    def inside(self) -> torch.Tensor:
        """Returns where a matrix of responses holds tokens, bool ``[rows, R]``."""
        return torch.arange(self.room) < torch.from_numpy(self.responses)[:, None]


def jagged(batch: Batch, spans: Spans) -> dict[str, Any]:
    """Returns what verl's engine reads of rows: ``input_ids``, ``position_ids``, and what they show, if anything."""
    ids = _rows_of(batch.within("input_ids", "attention_mask"), spans.tokens)
    if SHOWN not in batch:
        places = _rows_of(batch.within("position_ids", "attention_mask"), spans.tokens)
        return {"input_ids": ids, "position_ids": places}
    from tensordict import NonTensorData, NonTensorStack
    from verl.utils import tensordict_utils as tu

    masks = batch["attention_mask"].bool()
    each = [row[..., there] for row, there in zip(batch["position_ids"], masks, strict=True)]  # [4, tokens]
    return {
        "input_ids": ids,
        "position_ids": tu.nested_tensor_from_tensor_list(each, ragged_idx=2),
        SHOWN: NonTensorStack(*[NonTensorData(dict(one.inputs)) for one in batch[SHOWN]]),
    }


def halves(ids: torch.Tensor, spans: Spans) -> dict[str, torch.Tensor]:
    """Returns ``prompts`` and ``responses`` as verl's losses read them, from the tokens of rows, one after another."""
    asked = spans.tokens - spans.responses
    pieces = ids.split(np.stack([asked, spans.responses], axis=1).reshape(-1).tolist())
    return {
        "prompts": _rows_of(torch.cat(pieces[::2]), asked),
        "responses": _rows_of(torch.cat(pieces[1::2]), spans.responses),
    }


def _rows_of(values: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """Returns rows of these lengths as a jagged tensor, from their values one after another."""
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets)


@dataclass(frozen=True)
class Division:
    """How a trained model divides rows: ``size`` of them make a micro-batch.

    With ``max_tokens`` verl makes micro-batches of as many rows as fit instead. ``balance`` gives ranks rows of about
    the same number of tokens together, by verl's partitions.
    """

    rank: int
    world: int
    size: int
    max_tokens: int | None = None
    balance: bool = False

    def slots(self, lengths: np.ndarray) -> np.ndarray:
        """Returns the row in each place of each micro-batch, -1 for padding, ``[world x micro-batches, size]``.

        With ``max_tokens`` there is one piece a rank, of which verl makes micro-batches, and a row that is longer
        raises ConfigError. ``lengths`` are the tokens of each row, prompt included.
        """
        rows = len(lengths)
        if rows < 1:
            raise DataflowError("trainer: a batch without rows can be neither scored nor trained on.")
        if self.max_tokens is not None and max(lengths) > self.max_tokens:
            raise ConfigError(
                f"trainer.max_tokens_per_gpu={self.max_tokens}: a sample has {max(lengths)} tokens, prompt included; "
                "give at least as many."
            )
        micro_batches = 1 if self.max_tokens is not None else math.ceil(rows / (self.world * self.size))
        pieces = self.world * micro_batches
        split = np.array_split(np.arange(rows), pieces)
        if self.balance and self.world > 1 and rows % self.world == 0:
            ranks = _balanced(tuple(lengths.tolist()), self.world)
            split = [piece for mine in ranks for piece in np.array_split(np.array(mine), micro_batches)]
        slots = np.full((pieces, math.ceil(rows / pieces)), -1)
        for slot, piece in zip(slots, split, strict=True):
            slot[: len(piece)] = piece
        return slots

    def mine(self, slots: np.ndarray) -> np.ndarray:
        """Returns this rank's rows, -1 for padding."""
        return slots.reshape(self.world, -1)[self.rank]  # type: ignore[no-any-return]

    def imbalance(self, lengths: np.ndarray, slots: np.ndarray) -> dict[str, float]:
        """Returns verl's ``global_seqlen/*``: tokens of the ranks with consecutive rows, and with theirs (balanced)."""
        if len(lengths) < self.world:
            return {}
        from verl.utils.seqlen_balancing import log_seqlen_unbalance

        ranks = [[int(row) for row in mine if row >= 0] for mine in slots.reshape(self.world, -1)]
        found = log_seqlen_unbalance(lengths.tolist(), ranks, "global_seqlen")
        return {name: float(value) for name, value in found.items()}

    def gather(self, mine: torch.Tensor, spans: Spans, slots: np.ndarray) -> Ragged:
        """Returns the outputs of all ranks in the batch's order, without rows that pad, from this rank's values."""
        flat = slots.reshape(-1)
        lengths = spans.responses[np.maximum(flat, 0)]
        parts = [mine]
        if self.world > 1:
            sizes = lengths.reshape(self.world, -1).sum(axis=1).tolist()
            sent = mine.new_zeros(max(sizes))
            sent[: len(mine)] = mine
            parts = [torch.empty_like(sent) for _ in range(self.world)]
            dist.all_gather(parts, sent)
            parts = [part[:size] for part, size in zip(parts, sizes, strict=True)]
        values = torch.cat(parts).cpu().numpy()
        order = np.empty(int((flat >= 0).sum()), dtype=np.int64)
        order[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
        begins, starts = np.cumsum(lengths) - lengths, np.zeros_like(lengths)
        return Ragged(values, begins, lengths, starts, spans.room, np.dtype(np.float32)).rows(order)


@functools.lru_cache(maxsize=4)
def _balanced(lengths: tuple[int, ...], ranks: int) -> list[list[int]]:
    """Returns the rows of each rank by verl's partitions, ascending; often asked for the same rows again."""
    from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

    return [sorted(mine) for mine in get_seqlen_balanced_partitions(list(lengths), k_partitions=ranks, equal_size=True)]
