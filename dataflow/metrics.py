"""Numbers that the tasks of a step log, and how they make the number of the step. Pure.

A plain number says nothing of what it is over, so those of several tasks are averaged. One of the kinds here says it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from dataflow.errors import StageFailed


class Metric(float):
    """What one task logs of a metric of its step."""

    @classmethod
    def whole(cls, logged: Sequence[Self]) -> float:
        """Returns the metric of the step, from what its tasks logged."""
        raise NotImplementedError


class Mean(Metric):
    """A mean over some samples or tokens of a step; that of the step counts each of them once.

    >>> Mean.whole([Mean(1.0, of=3), Mean(0.0, of=1)])
    0.75
    """

    of: float

    def __new__(cls, value: float, of: float) -> Self:
        """Args:
        value: the mean.
        of: how many it is over.
        """
        found = super().__new__(cls, value)
        found.of = float(of)
        return found

    def __getnewargs__(self) -> Any:
        return float(self), self.of

    @classmethod
    def whole(cls, logged: Sequence[Self]) -> float:
        total = sum(each.of for each in logged)
        return sum(float(each) * each.of for each in logged if each.of) / total if total else float(logged[0])


class Sum(Metric):
    """A count, such as of tokens; that of the step is the sum.

    >>> Sum.whole([Sum(3), Sum(4)])
    7.0
    """

    @classmethod
    def whole(cls, logged: Sequence[Self]) -> float:
        return float(sum(logged))


class Provisional(Metric):
    """A number that counts only if no other task of the step logs the metric, such as one of fewer samples."""

    @classmethod
    def whole(cls, logged: Sequence[Self]) -> float:
        return float(logged[-1])


def of_step(name: str, numbers: Sequence[float]) -> float:
    """Returns the metric of a step from the numbers that its tasks logged.

    As in verl, a metric whose last word has ``max`` or ``min`` in it is reduced by that, and any other that does not
    say what it counts by the mean. Numbers that do not all say what they count in the same way raise StageFailed.

    >>> of_step("staleness/max", [0.0, 1.0]), of_step("actor/lr", [1.0, 2.0])
    (1.0, 1.5)
    """
    numbers = [each for each in numbers if not isinstance(each, Provisional)] or numbers
    kinds = {type(each) if isinstance(each, Metric) else float for each in numbers}
    if len(kinds) > 1:
        named = " and ".join(sorted("plain numbers" if kind is float else f"{kind.__name__}(...)" for kind in kinds))
        raise StageFailed(f"the tasks of a step log {named} as metric '{name}'; log one kind, or under other names.")
    if isinstance(numbers[0], Metric):
        return type(numbers[0]).whole(numbers)  # type: ignore[arg-type]
    reduces = by_name(name)
    return float(reduces(numbers)) if reduces is not None else sum(numbers) / len(numbers)


def by_name(name: str) -> Any:
    """Returns ``max`` or ``min`` for a metric that is reduced by it, by the last word of its name, else None.

    >>> by_name("critic/score/minerva/mean"), by_name("actor/mini_batches")
    (None, None)
    """
    last = name.rsplit("/", 1)[-1]
    if "max" in last:
        return max
    return min if "min" in last.replace("mini", "") else None
