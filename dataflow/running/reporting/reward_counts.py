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


class RewardCounts:
    """Counts requests by the trace, which says how each ended, and tokens and hedges by the rows of metrics."""

    def __init__(self) -> None:
        self._logged: Counter[tuple[str, str]] = Counter()

    def add(self, row: Mapping[str, float | None]) -> None:
        """Adds what a row of metrics says."""
        for name, value in row.items():
            if value and (match := _METRIC.fullmatch(name)):
                self._logged[match["agent"] or MAIN, match["name"]] += int(value)

    def counts(self, traces: Sequence[Trace]) -> dict[str, Any]:
        """Returns the ``rewards`` of a run's summary; {} if it requested none.

        Each submitted request is scored, failed or cancelled; ``cancelled`` includes requests whose reward was not
        collected because the run ended or was interrupted.

        Args:
            traces: of the run, and of evaluations outside its clock.

        Returns:
            :data:`COUNTS` and ``latency_s``, the quantiles of calls; of several agents their sums, and ``agents``.
        """
        names = dict.fromkeys(agent for trace in traces for agent in agents_of(trace))
        each = {agent: self._of(agent, [part_of(t, agent) for t in traces]) for agent in names}
        known = {agent: counts for agent, counts in each.items() if counts}
        if len(known) < 2:
            return next(iter(known.values()), {})
        sums = {name: sum(counts[name] for counts in known.values()) for name in COUNTS}
        return {**sums, "latency_s": _latency(traces), "agents": known}

    def _of(self, agent: str, traces: Sequence[Trace]) -> dict[str, Any]:
        sent = ended = retried = 0
        how: Counter[str] = Counter()
        for trace in traces:
            marks = [mark.args for mark in trace.marks if mark.name == "reward"]
            ended += len(marks)
            how.update(args.get("how", "") for args in marks)
            retried += sum(max(0, args.get("tries", 1) - 1) for args in marks)
            sent += max(len(marks), sum(int(span.args.get("requests", 0)) for span in trace.spans))
        if not sent:
            return {}
        scored = ended - how["failed"] - how["cancelled"]
        return {
            "requested": sent,
            "scored": scored,
            "failed": how["failed"],
            "cancelled": sent - scored - how["failed"],
            "retried": retried,
            "hedged": self._logged[agent, "hedged"],
            "cached": how["ledger"],
            "shared": how["shared"],
            "tokens": self._logged[agent, "tokens"],
            "latency_s": _latency(traces),
        }


def _latency(traces: Iterable[Trace]) -> dict[str, float | None]:
    """Returns the quantiles of the durations of the requests that were answered by a call, in seconds."""
    from dataflow.rewards.steps import latency_summary

    called_s = array("d", (m.end - m.begin for t in traces for m in t.marks if m.name == "reward" and called(m.args)))
    found = latency_summary(called_s)
    return {name: found.get(name) for name in QUANTILES}
