"""Reads the numbers that user code returns."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from dataflow.errors import an

LARGEST_SCORE = 1e15
"""float32 holds its square times 10^8, the tokens over which advantages may be whitened."""


def real_number(value: Any) -> float:
    """Returns a number as float, NaN and infinities included; an array or tensor of one element as that element.

    It raises ValueError, which names the value, for any other.

    >>> real_number(True), real_number(2)
    (1.0, 2.0)
    """
    what, number, shape = kind_of(value), value, getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item"):
        if math.prod(shape) != 1:
            raise ValueError(f"{what} of shape {tuple(shape)}")
        if getattr(value.dtype, "kind", "") in ("m", "M"):  # a date or duration, of which item() may be an integer
            raise ValueError(f"{what} of {value.dtype}")
        number = value.item()
    if not isinstance(number, numbers.Real):
        raise ValueError(what)
    try:
        return float(number)
    except OverflowError as error:
        raise ValueError("a number too large for a float") from error


def kind_of(value: Any) -> str:
    """Returns the description of a value for messages: "None" or its type."""
    return "None" if value is None else an(type(value).__name__)


def finite(value: Any) -> Any:
    """Returns what JSON can hold of metrics and samples: None for NaN and infinities, numbers for arrays."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return value
