"""Totals of a run's reward requests: of each of its agents, and of all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dataflow.rewards.naming import MAIN
from dataflow.running.reporting.reward_totals import COUNTS, QUANTILES, RewardTotals, latencies
from dataflow.timeline.agents import agents_of, part_of
from dataflow.timeline.spans import Trace

_METRIC = re.compile(rf"^{MAIN}/(?:(?P<agent>[^/]+)/)?[^/]+$")

Stats = Mapping[str, Mapping[str, Any]]
"""What each agent says of itself, by its name."""


class AgentTotals:
    """A :class:`RewardTotals` for each agent."""

    def __init__(self) -> None:
        self._of: dict[str, RewardTotals] = {}

    def _totals(self, agent: str) -> RewardTotals:
        return self._of.setdefault(agent, RewardTotals(agent))

    def seen(self, stats: Stats) -> dict[str, dict[str, Any]]:
        """Returns the agents' stats plus the counts of earlier processes of each, so that no count ever decreases."""
        return {agent: self._totals(agent).seen(of) for agent, of in stats.items()}

    def step(self, metrics: Mapping[str, float | None]) -> None:
        """Adds the usage that a step logged."""
        found = filter(None, map(_METRIC.match, metrics))
        for agent in dict.fromkeys(match["agent"] or MAIN for match in found):
            self._totals(agent).step(metrics)

    def resumed(self, counts: Mapping[str, Any], unlogged: Mapping[str, Mapping[str, int]]) -> None:
        """Begins a process of a run that resumes; see :meth:`RewardTotals.resumed`.

        Args:
            counts: ``rewards`` of the summary that the earlier processes left.
            unlogged: what :meth:`beyond` returned when the run was resumed before.
        """
        each = counts.get("agents") or {next(iter(self._of), MAIN): counts}
        for agent in dict.fromkeys([*each, *unlogged, *self._of]):
            self._totals(agent).resumed(each.get(agent, {}), unlogged.get(agent, {}))

    def restarted(self, traces: Sequence[Trace]) -> None:
        """Begins an attempt with new agents, given what remains of the traces so far."""
        for agent, totals in self._of.items():
            totals.restarted([part_of(trace, agent) for trace in traces])

    def beyond(self, rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
        """Returns what each agent spent until an attempt began, less what the rows of metrics that stay have of it."""
        logged = AgentTotals()
        for row in rows:
            logged.step(row)
        return {agent: dict(totals.spent - logged._totals(agent).spent) for agent, totals in self._of.items()}

    def counts(self, traces: Sequence[Trace], stats: Stats | None = None) -> dict[str, Any]:
        """Returns the ``rewards`` of a run's summary; {} if it requested none.

        Args:
            traces: of the run, and of evaluations outside its clock.
            stats: of the agents that are still alive.

        Returns:
            The counts of :meth:`RewardTotals.counts`; of several agents their sums, and ``agents``, those of each.
        """
        stats = stats or {}
        names = dict.fromkeys([*(agent for trace in traces for agent in agents_of(trace)), *stats])
        each = {
            agent: self._totals(agent).counts([part_of(trace, agent) for trace in traces], stats.get(agent))
            for agent in names
        }
        known = {agent: counts for agent, counts in each.items() if counts}
        if len(known) < 2:
            return next(iter(known.values()), {})
        sums = {name: sum(counts[name] for counts in known.values()) for name in COUNTS}
        latency = latencies(mark for trace in traces for mark in trace.marks)
        return {**sums, "latency_s": {name: latency.get(name) for name in QUANTILES}, "agents": known}
