"""Rows in the form of verl's engine: tokens and their positions without padding, outputs as jagged as these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dataflow.batch import Batch

if TYPE_CHECKING:
    from tensordict import TensorDict

INPUTS = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
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

    def of(self, slots: np.ndarray) -> Spans:
        """Returns the spans of the rows in these slots; -1 is the first row."""
        rows = np.maximum(slots, 0)
        return Spans(self.tokens[rows], self.responses[rows], self.room)

    def places(self) -> torch.Tensor:
        """Returns the places of the outputs for the responses' tokens: each is predicted at the token before it."""
        begins = np.cumsum(self.tokens) - self.responses - 1
        shift = begins - (np.cumsum(self.responses) - self.responses)
        return torch.from_numpy(np.arange(int(self.responses.sum())) + np.repeat(shift, self.responses))


def jagged(batch: Batch) -> dict[str, torch.Tensor]:
    """Returns the tokens and their positions without padding, as verl's ``left_right_2_no_padding`` makes them."""
    lengths = batch.nonzero("attention_mask")
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    return {
        name: torch.nested.nested_tensor_from_jagged(batch.within(name, "attention_mask"), offsets=offsets)
        for name in ("input_ids", "position_ids")
    }


def with_images(share: TensorDict, shown: Sequence[Any]) -> TensorDict:
    """Returns rows without padding, with what each of them shows."""
    from tensordict import NonTensorData, NonTensorStack
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import left_right_2_no_padding

    share[SHOWN] = NonTensorStack(*[NonTensorData(dict(one.inputs)) for one in shown])
    masks = share["attention_mask"].bool()
    places = [row[..., there] for row, there in zip(share["position_ids"], masks, strict=True)]
    share = left_right_2_no_padding(share)
    # [4, tokens]: of rows of equal length, verl's function takes the 4 for the number of tokens.
    share["position_ids"] = tu.nested_tensor_from_tensor_list(places, ragged_idx=2)
    return share


def inputs_of(batch: Batch, *more: str, **renamed: str) -> Batch:
    """Returns the columns that the model reads, unread, and others that are named as in :meth:`Batch.only`."""
    return batch.only(*INPUTS, *([SHOWN] if SHOWN in batch else []), *more, **renamed)
