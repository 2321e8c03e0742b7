"""What is reported of finished requests: reward columns, trace records, a step's metrics, latencies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from dataflow.batch import Batch
from dataflow.rewards.filter import indistinct
from dataflow.rewards.requests import ENDED, Request, StepRequests

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


def rewards_of(state: StepRequests, chosen: Sequence[int]) -> Batch:
    """Returns the rewards of finished groups and removes them from the step."""
    import torch

    requests = [request for group in chosen for request in state.groups.pop(group)]
    state.ended += requests
    replaced, state.replaced = state.replaced, []
    names = dict.fromkeys(name for request in requests for name in request.extras)
    columns: dict[str, Any] = {name: [request.extras.get(name) for request in requests] for name in names}
    columns["score"] = torch.tensor([request.score for request in requests], dtype=torch.float32)
    if state.rule.drops:
        columns["kept"] = torch.tensor([request.kept for request in requests])
    return Batch(
        [request.group for request in requests],
        columns,
        {
            "latency_s": [request.end - request.begin for request in requests],
            "records": [record(request) for request in requests],
            "replaced": [record(request) for request in replaced],
        },
    )


def record(request: Request) -> dict[str, Any]:
    """Returns the trace's record of a request: its place, times, and anything unusual."""
    facts: dict[str, Any] = {
        "group": request.group,
        "sample": request.sample,
        "begin": request.begin,
        "end": request.end,
    }
    if request.tries > 1:
        facts["tries"] = request.tries
    if request.how:
        facts["how"] = request.how
    if request.notes:
        facts |= request.notes
    return facts


def step_summary(state: StepRequests) -> dict[str, float]:
    """Returns the metrics of the collected part of a step, keyed by name without ``reward/``."""
    requests = state.ended
    scores: dict[int, list[float]] = {}
    for request in requests:
        if request.kept and not math.isnan(request.score):
            scores.setdefault(request.group, []).append(request.score)
    called = [request for request in requests if request.how not in ("ledger", "shared", "cancelled")]
    hows = [request.how for request in requests]
    latency = latency_summary([request.end - request.begin for request in called])
    return {
        "requested": float(len(requests)),
        "scored": float(len(requests) - hows.count("failed") - hows.count("cancelled")),
        "failed": float(hows.count("failed")),
        "retried": float(sum(max(0, request.tries - 1) for request in called)),
        **{name: float(sum((request.notes or {}).get(name, 0) for request in called)) for name in ENDED},
        "hedged": float(hows.count("hedged")),
        "cached": float(hows.count("ledger") + hows.count("shared")),
        "indistinct": float(sum(len(indistinct(of_group)) for of_group in scores.values())),
        **(
            {"filtered_groups": float(state.left_out), "equal_groups": float(state.equal)} if state.group_filter else {}
        ),
        **{f"latency_{name}": value for name, value in latency.items()},
    }
