"""Reads what a reward function and its methods return: scores that can be trained on, and extra columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from dataflow.usercode.copies import own_copy
from dataflow.usercode.numeric import LARGEST_SCORE, kind_of, real_number

RESERVED = frozenset({
    "attention_mask", "finish_reason", "input_ids", "kept", "position_ids", "prompts", "response_mask", "responses",
    "request_begin", "request_end", "request_failed_tries", "request_how", "request_tries",
})  # fmt: skip
"""Columns of the rollout and of the request, which a reward must not return."""
_EXACT = 2.0**53
"""Below it a float holds each whole number."""


def read_number(value: Any) -> float:
    """Returns a number as float; an array or tensor of one element counts as that element.

    Raises a ValueError that names what the value is if that is not a finite number.
    """
    number = real_number(value)
    if not math.isfinite(number):
        raise ValueError(str(number))
    return number


def read_score(value: Any) -> float:
    """Returns a score as float, as :func:`read_number` does.

    Raises a ValueError also for a score that is so large that its advantages may not be finite.
    """
    number = read_number(value)
    if abs(number) > LARGEST_SCORE:
        raise ValueError(f"{number:g}, outside of ±{LARGEST_SCORE:g}, where float32 may hold no finite advantages")
    return number


def read_scores(scores: Any, count: int) -> list[float]:
    """Returns the scores that ``post_process_scores`` returned for ``count`` samples: a list, an array or a tensor.

    Raises a ValueError if they are something else, are not as many, or contain what is no score.
    """
    # Iterating over these yields characters, bytes, keys, or values in no order.
    if isinstance(scores, str | bytes | Mapping | Set) or not hasattr(scores, "__len__"):
        raise ValueError(kind_of(scores))
    if getattr(scores, "shape", None) == ():
        raise ValueError(f"{kind_of(scores)} of one number")
    if len(scores) != count:
        raise ValueError(f"{len(scores)} scores for {count} samples")
    return [read_score(score) for score in scores]


def read_result(result: Any) -> tuple[float, dict[str, Any]]:
    """Returns the score and the extra columns of what a reward function returned.

    Raises:
        ValueError: the result is not a number, (score, query, explanation) or a dict with ``score``.

    >>> read_result((1, "2 + 2?", "right"))
    (1.0, {'query': '2 + 2?', 'explanation': 'right'})
    """
    if isinstance(result, Mapping):
        if "score" not in result:
            raise ValueError(f"a dict without 'score' (keys: {', '.join(map(repr, result)) or 'none'})")
        for key in result:
            if not isinstance(key, str):
                raise ValueError(f"a dict with the key {key!r}, which is not a column name")
            if key in RESERVED:
                raise ValueError(f"a dict with the key {key!r}, which is a column of the rollout or the request")
        score, where = result["score"], "a dict whose 'score' is"
        extras = {key: value for key, value in result.items() if key != "score"}
    elif isinstance(result, tuple):
        if len(result) != 3:
            raise ValueError(f"a tuple of {len(result)}")
        score, where = result[0], "a tuple whose score is"
        extras = {"query": result[1], "explanation": result[2]}
    else:
        return read_score(result), {}
    try:
        # Copies: the function may keep what it returned, and change it for the next sample.
        return read_score(score), own_copy(extras)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from error


def tokens_used(result: Any) -> int | None:
    """Returns the tokens that a call used, by the column ``tokens`` of its result, which may be of any kind.

    None if there is no such column, or it is no count, such as the tokens themselves.
    """
    value = result.get("tokens") if isinstance(result, Mapping) else None
    try:
        number = -1.0 if isinstance(value, bool) else real_number(value)
    except ValueError:
        return None
    return int(number) if 0 <= number < _EXACT and number.is_integer() else None
