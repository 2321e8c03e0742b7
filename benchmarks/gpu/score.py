"""A reward function for a model of random weights: waits 1..40 s, scaled, as a judge would, and scores at random.

Scores by what the model wrote would all be 0, and nothing would be trained.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

SHORTEST_S, LONGEST_S = 1.0, 40.0
drawn = random.Random(0)


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any], scale: float = 0.0
) -> float:
    await asyncio.sleep(scale * drawn.uniform(SHORTEST_S, LONGEST_S))
    return drawn.random()
