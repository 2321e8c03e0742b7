"""What a reward function may return: a score that can be trained on, and columns beside it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

MOST = float.fromhex("0x1.fffffep+127")
"""The largest score: scores are trained on as float32, in which a larger one would be infinite."""

RESERVED = frozenset({"attention_mask", "input_ids", "kept", "position_ids", "prompts", "response_mask", "responses"})
"""Columns that a reward's own must not take the place of."""


def read_number(value: Any) -> float:
    """Returns a number that is finite in float32, as float; an array or tensor of one element counts as that element.

    Raises:
        ValueError: it is none; the message names what it is.
    """
    if type(value) is float and -MOST <= value <= MOST:
        return value  # by far the most, and the checks below cost more than all else that is done with it
    what = "None" if value is None else f"a {type(value).__name__}"
    shape = getattr(value, "shape", None)
    if shape is not None and hasattr(value, "item"):
        if math.prod(shape) != 1:
            raise ValueError(f"{what} of shape {tuple(shape)}")
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise ValueError(what)
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("a number too large for a float") from error
    if not math.isfinite(number):
        raise ValueError(str(number))
    if abs(number) > MOST:
        raise ValueError(f"{number:g}, which float32 cannot hold")
    return number


def tokens_used(columns: Mapping[str, Any]) -> int | None:
    """Returns what a call says that it used, in its column ``tokens``; None if it says nothing."""
    tokens = columns.get("tokens")
    if type(tokens) is int:
        return tokens
    return int(tokens) if isinstance(tokens, numbers.Integral) and not isinstance(tokens, bool) else None


def read_result(result: Any) -> tuple[float, dict[str, Any]]:
    """Returns the score and the extra columns of what a reward function returned.

    Raises:
        ValueError: neither a number, (score, query, explanation) nor a dict with ``score``.

    >>> read_result((1, "2 + 2?", "right"))
    (1.0, {'query': '2 + 2?', 'explanation': 'right'})
    """
    if type(result) is float:
        return read_number(result), {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"a dict without 'score' (keys: {', '.join(map(repr, result)) or 'none'})")
        odd = next((key for key in result if not isinstance(key, str)), None)
        if odd is not None:
            raise ValueError(f"a dict with the key {odd!r}, which is no column name")
        if taken := RESERVED.intersection(result):
            raise ValueError(f"a dict with the key {min(taken)!r}, which is a column of the rollout's")
        extras = {key: value for key, value in result.items() if key != "score"}
        return _part(result["score"], "a dict whose 'score' is"), extras
    if isinstance(result, tuple):
        if len(result) != 3:
            raise ValueError(f"a tuple of {len(result)}")
        return _part(result[0], "a tuple whose score is"), {"query": result[1], "explanation": result[2]}
    return read_number(result), {}


def _part(value: Any, where: str) -> float:
    try:
        return read_number(value)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error
