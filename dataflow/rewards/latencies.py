"""Latencies: their percentiles, in a histogram or of a list."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

ACCURACY = 0.01
"""Largest relative error of a percentile."""

_GROWTH = math.log((1 + ACCURACY) / (1 - ACCURACY))
_LEAST_S, _MOST_S = 1e-6, 1e9  # values outside are clipped: at most about 1,700 buckets


class Latencies:
    """A histogram of durations whose size does not grow with their number.

    Buckets grow by a constant factor, so that each percentile is within :data:`ACCURACY`. Count, mean and maximum are
    exact.
    """

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0
        self._sum = self._max = 0.0

    def __len__(self) -> int:
        return self._count

    def append(self, seconds: float) -> None:
        """Adds one duration, in seconds."""
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
                # The middle of the bucket: the relative error is the same at both of its ends.
                return min(2 * math.exp(bucket * _GROWTH) / (1 + math.exp(_GROWTH)), self._max)
        return self._max


def latency_summary(latency_s: Sequence[float]) -> dict[str, float]:
    """Returns p50, p95, p99, max and mean of durations, in seconds; nothing if there are none."""
    if not len(latency_s):
        return {}
    values = np.asarray(latency_s, dtype=np.float64)
    p50, p95, p99 = np.percentile(values, [50, 95, 99]).tolist()
    return {"p50": p50, "p95": p95, "p99": p99, "max": float(values.max()), "mean": float(values.mean())}
