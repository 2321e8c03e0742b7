"""Totals of one agent's reward requests over all its processes, as a rebuilt agent counts from 0."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from dataflow.rewards.naming import MAIN, metric
from dataflow.timeline.spans import Mark, Trace, called

COUNTS = ("requested", "scored", "failed", "cancelled", "retried", "hedged", "cached", "shared", "tokens")
_GROWING = (*COUNTS, "timed_out", "throttled", "cost", "rate_limit_wait_s")
_SPENT = ("tokens", "hedged")
"""Counts that the trace does not have."""
QUANTILES = ("p50", "p95", "p99")


class RewardTotals:
    """Sums the stats of an agent's processes, and counts the requests in traces.

    Args:
        agent: its name, which its metrics have.
    """

    def __init__(self, agent: str = MAIN) -> None:
        self._agent = agent
        self._last: dict[str, Any] = {}
        self._lost: Counter[str] = Counter()
        self._used: Counter[str] = Counter()
        self._earlier: Counter[str] = Counter()
        self._failed = 0  # in the trace when the attempt began, less those that earlier agents counted

    def seen(self, stats: Mapping[str, Any]) -> dict[str, Any]:
        """Returns an agent's stats plus the counts of earlier agents, so that no count ever decreases."""
        total = dict(stats)
        for name in _GROWING:
            if name in stats:
                now = stats[name]
                self._lost[name] += max(0, self._last.get(name, 0) - now)
                self._last[name] = now
                total[name] = now + self._lost[name]
        return total

    def step(self, metrics: Mapping[str, float | None]) -> None:
        """Adds the usage that a step logged."""
        for name in _SPENT:
            self._used[name] += int(metrics.get(metric(self._agent, name)) or 0)

    def resumed(self, counts: Mapping[str, Any], unlogged: Mapping[str, int]) -> None:
        """Begins a process of a run that resumes, after :meth:`step` has seen what earlier ones logged.

        Args:
            counts: of the earlier processes, as their summary has them: with what was paid for after the last log.
            unlogged: of them, where they left no summary: what the logs that were kept do not have.
        """
        for name in _SPENT:
            logged = self._used.pop(name, 0) + int(unlogged.get(name, 0))
            self._earlier[name] = max(int(counts.get(name, 0)), logged)

    def restarted(self, traces: Iterable[Trace]) -> None:
        """Begins an attempt with a new agent, given what remains of the traces so far."""
        for name, count in self._last.items():
            self._lost[name] += count
        self._last = {}
        told = sum(mark.args.get("how") == "failed" for trace in traces for mark in trace.marks)
        self._failed = told - self._lost["failed"]

    def counts(self, traces: Iterable[Trace], stats: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the counts of the agent's requests; {} if there were none.

        Each submitted request is scored, failed or cancelled; ``cancelled`` includes requests whose reward was not
        collected because the run ended or was interrupted. If an agent died, ``tokens`` and ``hedged`` are lower
        bounds, since what it had not logged is unknown.

        Args:
            traces: what the agent did in the run, and in evaluations outside its clock.
            stats: of the agent, if it is still alive.
        """
        from dataflow.rewards.requests import latency_summary

        sent = ended = retried = 0
        how: Counter[str] = Counter()
        durations = array("d")
        for trace in traces:
            before = ended
            for mark in trace.marks:
                if mark.name == "reward":
                    ended += 1
                    how[mark.args.get("how", "")] += 1
                    retried += max(0, mark.args.get("tries", 1) - 1)
                    if called(mark.args):
                        durations.append(mark.end - mark.begin)
            noted = sum(int(span.args.get("requests", 0)) for span in trace.spans)
            sent += max(noted, ended - before)
        total = {**self._lost, **self.seen(stats or self._last)}
        if not sent:  # a user's own stages may record nothing in the trace
            latency = total.get("latency_s") or {}
            counts = {name: total.get(name, 0) for name in COUNTS} if stats else {}
        else:
            scored = ended - how["failed"] - how["cancelled"]
            # Of a step that failed none is in the trace, not even the one that ended the run.
            untold = total.get("failed", 0) + self._failed - how["failed"]
            failed = how["failed"] + min(max(0, untold), sent - ended)
            counts = {
                "requested": sent,
                "scored": scored,
                "failed": failed,
                "cancelled": sent - scored - failed,
                "retried": retried,
                "hedged": self._spent("hedged", total),
                "cached": how["ledger"],
                "shared": how["shared"],
                "tokens": self._spent("tokens", total),
            }
            latency = latency_summary(durations)
        if not counts:
            return {}
        return {**counts, "latency_s": {name: latency.get(name) for name in QUANTILES}}

    @property
    def spent(self) -> Counter[str]:
        """What was spent until the attempt began, in all processes."""
        return Counter({name: self._spent(name, self._lost) for name in _SPENT})

    def _spent(self, name: str, total: Mapping[str, Any]) -> int:
        return self._earlier[name] + int(max(total.get(name, 0), self._used[name]))


def latencies(marks: Iterable[Mark]) -> dict[str, float]:
    """Returns quantiles of the durations of the requests that were answered by a call, in seconds."""
    from dataflow.rewards.requests import latency_summary

    return latency_summary(array("d", (mark.end - mark.begin for mark in marks if called(mark.args))))
