"""Reward requests with their groups, as arrays, so that a step of thousands is handled at once. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Sample: TypeAlias = tuple[int, float]
"""(group, seconds) of one request."""
Numbers: TypeAlias = NDArray[np.int64]
Seconds: TypeAlias = NDArray[np.float64]


class Requests:
    """Reward requests in the order in which they are sent; not to be changed.

    Attributes:
        groups: group of each request, shape (requests,).
        seconds: that each request takes, shape (requests,).
    """

    def __init__(self, groups: Numbers, seconds: Seconds) -> None:
        self.groups = groups
        self.seconds = seconds

    @classmethod
    def of(cls, samples: Requests | Sequence[Sample]) -> Requests:
        """Returns requests that are given as (group, seconds)."""
        if isinstance(samples, Requests):
            return samples
        groups = np.array([group for group, _seconds in samples], dtype=np.int64)
        return cls(groups, np.array([seconds for _group, seconds in samples], dtype=np.float64))

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
        return Requests(self.groups[count:], self.seconds[count:])

    @cached_property
    def _order(self) -> Numbers:
        """The numbers of the requests, group by group."""
        return np.argsort(self.groups, kind="stable")

    @cached_property
    def _bounds(self) -> Numbers:
        """Where each group begins in :attr:`_order`."""
        ordered = self.groups[self._order]
        return np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))

    @cached_property
    def ids(self) -> Numbers:
        """The groups, in the order of their ids."""
        return self.groups[self.first]

    @cached_property
    def first(self) -> Numbers:
        """The number of each group's first request, in the order of :attr:`ids`."""
        return self._order[self._bounds]

    @cached_property
    def last(self) -> Numbers:
        """The number of each group's last request, in the order of :attr:`ids`."""
        return self._order[np.concatenate((self._bounds[1:], [len(self)])) - 1]

    @property
    def sizes(self) -> Numbers:
        """How many requests each group has, in the order of :attr:`ids`."""
        return np.diff(self._bounds, append=len(self))

    def most(self, values: Seconds) -> Seconds:
        """Returns the largest value of each group's requests, in the order of :attr:`ids`."""
        return np.maximum.reduceat(values[self._order], self._bounds)

    @property
    def total_s(self) -> float:
        """The seconds of all requests, added in their order."""
        return sum(self.seconds.tolist())
