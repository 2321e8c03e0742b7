"""A reward manager of your own: changes the results of any reward function, and forwards everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataflow.rewards.managers import Manager
from dataflow.rewards.results import read_result


class Clipped(Manager):
    """Clips scores to ``low`` and ``high``; the column ``raw`` is the score before."""

    def __init__(self, reward: Any, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__(reward)
        self._low, self._high = low, high

    def finish(self, result: Any, arguments: Mapping[str, Any]) -> Any:
        """Returns the changed result; runs in the process of the reward function."""
        try:
            score, columns = read_result(result)
        except ValueError:
            return result  # not a score: the agent reports the error
        return {**columns, "raw": score, "score": min(max(score, self._low), self._high)}
