"""Rows in the form of verl's engine: tokens and their positions without padding, outputs as jagged as these.

verl's losses take prompts and responses without padding, too, so that no padded matrix of tokens is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from dataflow.batch import Batch

INPUTS = ("input_ids", "attention_mask", "position_ids", "response_mask")
SHOWN = "multi_modal_inputs"
"""The column of what prompts show beside their text."""


@dataclass(frozen=True)
class Spans:
    """Where the responses lie in rows without padding.

    Attributes:
        tokens: of each row, prompt included, int64 ``[rows]``.
        responses: tokens of each response, int64 ``[rows]``.
        room: R, tokens that responses are padded to.
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


def jagged(batch: Batch, spans: Spans) -> dict[str, Any]:
    """Returns what verl's engine reads of rows: ``input_ids``, ``position_ids``, and what they show, if anything."""
    ids = batch.within("input_ids", "attention_mask")
    if SHOWN not in batch:
        places = _rows_of(batch.within("position_ids", "attention_mask"), spans.tokens)
        return {"input_ids": _rows_of(ids, spans.tokens), "position_ids": places}
    from tensordict import NonTensorData, NonTensorStack
    from verl.utils import tensordict_utils as tu

    masks = batch["attention_mask"].bool()
    each = [row[..., there] for row, there in zip(batch["position_ids"], masks, strict=True)]  # [4, tokens]
    return {
        "input_ids": _rows_of(ids, spans.tokens),
        "position_ids": tu.nested_tensor_from_tensor_list(each, ragged_idx=2),
        SHOWN: NonTensorStack(*[NonTensorData(dict(one.inputs)) for one in batch[SHOWN]]),
    }


def halves(ids: torch.Tensor, spans: Spans) -> dict[str, torch.Tensor]:
    """Returns ``prompts`` and ``responses`` of rows without padding, as verl's losses read them.

    Args:
        ids: the tokens of the rows, one row after another.
        spans: of the rows.
    """
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


def inputs_of(batch: Batch, *more: str, **renamed: str) -> Batch:
    """Returns the columns that rows for verl's engine are made of, unread, and others; see :meth:`Batch.only`."""
    return batch.only(*INPUTS, *([SHOWN] if SHOWN in batch else []), *more, **renamed)
