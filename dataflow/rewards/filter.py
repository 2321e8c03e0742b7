"""Dynamic sampling: a step samples more groups than it trains on, and leaves out those that would train nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dataflow.rewards.results import read_number
from dataflow.usercode.numeric import as_float32


class Scored(Protocol):
    """A sample of a finished group; the text of one names the sample."""

    @property
    def score(self) -> float: ...

    @property
    def extras(self) -> Mapping[str, Any]: ...

    @property
    def kept(self) -> bool: ...


@dataclass(frozen=True)
class GroupFilter:
    """Leaves out finished groups whose samples all have the same value, as long as enough others remain.

    Attributes:
        most: groups that may be left out in a step; further ones are collected, and train nothing.
        metric: ``score``, or another column that the reward returns.
    """

    most: int
    metric: str = "score"

    def equal(self, requests: Sequence[Scored]) -> bool:
        """Returns whether the samples of a finished group that count all have the same value, as float32 holds it.

        Raises:
            ValueError: the reward returned no such column, or one that holds no finite number or text; with the fix.
        """
        values = [self._value(request) for request in requests if request.kept]
        return all(value == values[0] for value in values)

    def _value(self, request: Scored) -> object:
        if self.metric == "score":
            return as_float32(request.score)
        if self.metric not in request.extras:
            known = ", ".join(["score", *request.extras])
            raise ValueError(
                f"{request}: the reward returned no column '{self.metric}' (algorithm.filter_groups.metric); "
                f"it has {known}."
            )
        value = request.extras[self.metric]
        if type(value) is str:
            return value
        try:
            return as_float32(read_number(value))
        except ValueError as error:
            raise ValueError(
                f"{request}: its column '{self.metric}' (algorithm.filter_groups.metric) is {error}; let the reward "
                "return a finite number or a text there."
            ) from error


def indistinct(scores: Sequence[float]) -> list[float]:
    """Returns the scores of a group that float32 does not tell from another one of the group, or from 0.

    >>> indistinct([1e8, 1e8 + 1, 2.0, 2.0]), indistinct([1e-46, 1.0])
    ([100000000.0, 100000001.0], [1e-46])
    """
    held: dict[float, set[float]] = {0.0: {0.0}}
    for score in scores:
        held.setdefault(as_float32(score), set()).add(score)
    return [score for score in scores if len(held[as_float32(score)]) > 1]
