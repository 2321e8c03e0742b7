"""Scores whether the last number of the response is right. A sync function: each call runs in a thread."""

from __future__ import annotations

import re
from typing import Any

NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], wrong: float = 0.0
) -> dict[str, Any]:
    """Returns 1, or ``wrong`` for a wrong number; the number found is a further column."""
    found = NUMBER.findall(solution_str.replace(",", ""))
    if not found:
        return {"score": 0.0, "answer": None}
    right = float(found[-1]) == float(ground_truth.replace(",", ""))
    return {"score": 1.0 if right else wrong, "answer": found[-1]}
