"""The latencies of an agent's calls: a histogram, whose size does not grow with the number of calls."""

from __future__ import annotations

import math
from collections import Counter

ACCURACY = 0.01
"""How far a percentile may be from the exact one, as a share of it."""

_GROWTH = math.log((1 + ACCURACY) / (1 - ACCURACY))
_LEAST_S, _MOST_S = 1e-6, 1e9  # what lies outside counts as this: some 1,700 buckets at most


class Latencies:
    """Durations in buckets that grow by a constant factor, so that each percentile is within :data:`ACCURACY`.

    Count, mean and maximum are exact.
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0
        self._sum = self._max = 0.0

    def __len__(self) -> int:
        return self._count

    def append(self, seconds: float) -> None:
        """Takes one duration."""
        self._buckets[math.ceil(math.log(min(max(seconds, _LEAST_S), _MOST_S)) / _GROWTH)] += 1
        self._count += 1
        self._sum += seconds
        self._max = max(self._max, seconds)

    def summary(self) -> dict[str, float]:
        """Returns p50, p95, p99, max and mean, in seconds; nothing if there are none."""
        if not self._count:
            return {}
        found = {f"p{percent}": self._percentile(percent) for percent in (50, 95, 99)}
        return {**found, "max": self._max, "mean": self._sum / self._count}

    def _percentile(self, percent: int) -> float:
        rank, seen = (self._count - 1) * percent / 100, 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen > rank:
                # The middle of the bucket, as far from its least as from its largest value, by share.
                return min(2 * math.exp(bucket * _GROWTH) / (1 + math.exp(_GROWTH)), self._max)
        return self._max
