"""A reward manager of your own: it changes what any reward function returned, and hands all else on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dataflow.rewards.user.managers import Manager
from dataflow.rewards.user.results import read_result


class Clipped(Manager):
    """Keeps scores within ``low`` and ``high``; the score before that becomes the column ``raw``."""

    def __init__(self, reward: Any, low: float = -1.0, high: float = 1.0) -> None:
        super().__init__(reward)
        self._low, self._high = low, high

    def finish(self, result: Any, arguments: Mapping[str, Any]) -> Any:
        """Returns the changed result; runs wherever the reward does."""
        try:
            score, columns = read_result(result)
        except ValueError:
            return result  # no score: the agent says what is wrong with it
        return {**columns, "raw": score, "score": min(max(score, self._low), self._high)}
