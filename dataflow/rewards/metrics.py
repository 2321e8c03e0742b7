"""The agent's numbers as Ray's own metrics, which a cluster exports to Prometheus as ``ray_dataflow_reward_*``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dataflow.rewards.naming import MAIN

COUNTED = (
    "requested",
    "scored",
    "failed",
    "cancelled",
    "retried",
    "hedged",
    "cached",
    "shared",
    "throttled",
    "timed_out",
    "tokens",
    "rate_limit_wait_s",
)
GAUGED = {"running": "calls in flight", "waiting": "requests for which no call runs", "abandoned": "abandoned calls"}


class Metrics(Protocol):
    """Receives the stats ``every_s`` seconds after the first change since the last report."""

    every_s: float

    def report(self, stats: Mapping[str, Any]) -> None: ...


class RayMetrics:
    """Reports the agent's stats to Ray's metrics agent.

    Args:
        run: the run's name, a label of every metric.
        agent: the agent's, likewise.
    """

    every_s = 1.0

    def __init__(self, run: str, agent: str = MAIN) -> None:
        from ray.util.metrics import Counter, Gauge

        keys, self._tags = ("run", "agent"), {"run": run, "agent": agent}
        self._counters = {n: Counter(_name(n), f"reward requests: {n}, so far", tag_keys=keys) for n in COUNTED}
        self._gauges = {n: Gauge(_name(n), text, tag_keys=keys) for n, text in GAUGED.items()}
        self._limit = Gauge(_name("limit"), "calls that may be in flight", tag_keys=(*keys, "endpoint"))
        self._latency = Gauge(_name("latency_s"), "latency of a request", tag_keys=(*keys, "quantile"))
        self._before: dict[str, float] = {}

    def report(self, stats: Mapping[str, Any]) -> None:
        """Reports what has changed since the last call."""
        for name, counter in self._counters.items():
            now = float(stats.get(name, 0.0))
            grown = now - self._before.get(name, 0.0)
            self._before[name] = now
            if grown > 0:
                counter.inc(grown, tags=self._tags)
        for name, gauge in self._gauges.items():
            gauge.set(float(stats.get(name, 0.0)), tags=self._tags)
        for endpoint, limit in stats.get("limit", {}).items():
            self._limit.set(float(limit), tags={**self._tags, "endpoint": endpoint or "all"})
        for quantile, value in stats.get("latency_s", {}).items():
            self._latency.set(float(value), tags={**self._tags, "quantile": quantile})


def _name(metric: str) -> str:
    return f"dataflow_reward_{metric}"


def in_ray_worker() -> bool:
    """Whether this process is a Ray worker."""
    import sys

    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().worker.mode == ray.WORKER_MODE
