"""Reward requests with their groups, as arrays, so that a step of thousands is handled at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

Sample: TypeAlias = tuple[int, float]
"""(group, seconds) of one request."""
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"
Seconds: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


class Requests:
    """Reward requests in the order in which they are sent; not to be changed.

    Attributes:
        groups: group of each request, shape (requests,).
        seconds: that each request takes, shape (requests,).
        order: the numbers of the requests, those of a group side by side, shape (requests,).
        bounds: where each group begins in ``order``, shape (groups,).
    """

    def __init__(self, groups: Numbers, seconds: Seconds, order: Numbers, bounds: Numbers) -> None:
        self.groups = groups
        self.seconds = seconds
        self.order = order
        self.bounds = bounds

    @classmethod
    def sorted(cls, groups: Numbers, seconds: Seconds) -> Requests:
        """Returns requests of which it is not known where those of a group are."""
        order = np.argsort(groups, kind="stable")
        ordered = groups[order]
        bounds = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        return cls(groups, seconds, order, bounds)

    @classmethod
    def of(cls, samples: Requests | Sequence[Sample]) -> Requests:
        """Returns requests that are given as (group, seconds)."""
        if isinstance(samples, Requests):
            return samples
        groups = np.array([group for group, _seconds in samples], dtype=np.int64)
        return cls.sorted(groups, np.array([seconds for _group, seconds in samples], dtype=np.float64))

    def __len__(self) -> int:
        return len(self.seconds)

    def __iter__(self) -> Iterator[Sample]:
        return iter(self.pairs)

    @cached_property
    def pairs(self) -> list[Sample]:
        """(group, seconds) of each request."""
        return list(zip(self.groups.tolist(), self.seconds.tolist(), strict=True))

    def after(self, count: int) -> Requests:
        """Returns the requests without the first ``count``."""
        return self.sorted(self.groups[count:], self.seconds[count:])

    @cached_property
    def ids(self) -> Numbers:
        """Each group once, in the order of ``bounds``."""
        return self.groups[self.order[self.bounds]]

    @property
    def sizes(self) -> Numbers:
        """How many requests each group of :attr:`ids` has."""
        return np.diff(self.bounds, append=len(self))

    @cached_property
    def first(self) -> Numbers:
        """The number of the first request of each group of :attr:`ids`."""
        return np.minimum.reduceat(self.order, self.bounds)

    @cached_property
    def last(self) -> Numbers:
        """The number of the last request of each group of :attr:`ids`."""
        return np.maximum.reduceat(self.order, self.bounds)

    def most(self, values: Seconds) -> Seconds:
        """Returns the largest value among the requests of each group of :attr:`ids`."""
        return np.maximum.reduceat(values[self.order], self.bounds)

    @cached_property
    def total_s(self) -> float:
        """The seconds of all requests, added in their order."""
        return float(sum(self.seconds.tolist()))
