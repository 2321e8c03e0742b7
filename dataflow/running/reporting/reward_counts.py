"""Counts of a run's reward requests for its summary: of each agent, and of all."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dataflow.rewards.naming import MAIN
from dataflow.timeline.agents import agents_of, part_of
from dataflow.timeline.spans import Trace, called

COUNTS = ("requested", "scored", "failed", "cancelled", "retried", "hedged", "cached", "shared", "tokens")
QUANTILES = ("p50", "p95", "p99")
_METRIC = re.compile(rf"{MAIN}/(?:(?P<agent>[^/]+)/)?(?P<name>tokens|hedged)")

Stats = Mapping[str, Mapping[str, Any]]
"""What each agent says of itself, by its name."""


class RewardCounts:
    """Counts requests by the trace, which says how each ended, and tokens and hedges by the rows of metrics.

    What the agents say of themselves counts where it is more: of a step that failed, trace and rows say nothing.
    """

    def __init__(self) -> None:
        self._logged: Counter[tuple[str, str]] = Counter()
        self._before: Counter[tuple[str, str]] = Counter()
        """What was counted when the present agents began to count."""

    def add(self, row: Mapping[str, float | None]) -> None:
        """Adds what a row of metrics says."""
        for name, value in row.items():
            if value and (match := _METRIC.fullmatch(name)):
                self._logged[match["agent"] or MAIN, match["name"]] += int(value)

    def agents_begin(self, traces: Sequence[Trace]) -> None:
        """Call when agents begin to count at 0, with what the run's traces hold then."""
        self._before = Counter(self._logged)
        self._before.update(
            (mark.resource, "failed") for trace in traces for mark in trace.marks if mark.args.get("how") == "failed"
        )

    def counts(self, traces: Sequence[Trace], stats: Stats | None = None) -> dict[str, Any]:
        """Returns the ``rewards`` of a run's summary; {} if it requested none.

        Each submitted request is scored, failed or cancelled; ``cancelled`` includes requests whose reward was not
        collected because the run ended or was interrupted.

        Args:
            traces: of the run, and of evaluations outside its clock.
            stats: of the agents that are still alive.

        Returns:
            :data:`COUNTS` and ``latency_s``, the quantiles of calls; of several agents their sums, and ``agents``.
        """
        stats = stats or {}
        names = dict.fromkeys([*(agent for trace in traces for agent in agents_of(trace)), *stats])
        each = {agent: self._of(agent, [part_of(t, agent) for t in traces], stats.get(agent, {})) for agent in names}
        known = {agent: counts for agent, counts in each.items() if counts}
        if len(known) < 2:
            return next(iter(known.values()), {})
        sums = {name: sum(counts[name] for counts in known.values()) for name in COUNTS}
        return {**sums, "latency_s": _latency(traces), "agents": known}

    def _of(self, agent: str, traces: Sequence[Trace], stats: Mapping[str, Any]) -> dict[str, Any]:
        total = {
            name: max(self._logged[agent, name], self._before[agent, name] + int(stats.get(name, 0)))
            for name in ("tokens", "hedged", "failed")
        }
        sent = ended = retried = 0
        how: Counter[str] = Counter()
        for trace in traces:
            marks = [mark.args for mark in trace.marks if mark.name == "reward"]
            ended += len(marks)
            how.update(args.get("how", "") for args in marks)
            retried += sum(max(0, args.get("tries", 1) - 1) for args in marks)
            sent += max(len(marks), sum(int(span.args.get("requests", 0)) for span in trace.spans))
        if not sent:  # a user's own stages may record nothing in the trace
            latency = stats.get("latency_s") or {}
            found = {name: stats.get(name, 0) for name in COUNTS}
            return {**found, "latency_s": {name: latency.get(name) for name in QUANTILES}} if stats else {}
        scored = ended - how["failed"] - how["cancelled"]
        failed = how["failed"] + min(max(0, total["failed"] - how["failed"]), sent - ended)
        return {
            "requested": sent,
            "scored": scored,
            "failed": failed,
            "cancelled": sent - scored - failed,
            "retried": retried,
            "hedged": total["hedged"],
            "cached": how["ledger"],
            "shared": how["shared"],
            "tokens": total["tokens"],
            "latency_s": _latency(traces),
        }


def _latency(traces: Iterable[Trace]) -> dict[str, float | None]:
    """Returns the quantiles of the durations of the requests that were answered by a call, in seconds."""
    from dataflow.rewards.requests import latency_summary

    called_s = array("d", (m.end - m.begin for t in traces for m in t.marks if m.name == "reward" and called(m.args)))
    found = latency_summary(called_s)
    return {name: found.get(name) for name in QUANTILES}
