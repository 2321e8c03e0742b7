"""Shown: what a prompt shows its model beside the text, as verl's ``multi_modal_inputs``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Shown:
    """What a model that takes images reads of a prompt beside its token ids. The rows of a group share one.

    Attributes:
        inputs: ``pixel_values`` float32 ``[patches, values]`` and ``image_grid_thw`` int64 ``[images, 3]``; empty
            for a prompt without images.
        positions: of the prompt's tokens in time, height and width, int64 ``[3, tokens]``.
    """

    inputs: Mapping[str, Any]
    positions: Any

    def __deepcopy__(self, _memo: dict[int, Any]) -> Shown:
        return self  # nothing changes it, and pixels are large
