"""`policy=auto`: which policy a run changes to, predicted from the last steps of its own trace.

A run begins with the policy that overlaps most, and goes to one that is less stale where this loses nothing. It plans
every few steps, and at once after a step whose rewards took longer or shorter than those before it. Of a policy whose
steps take longer than predicted, more so than those of the others, the prediction is corrected.

As a program, ``python -m dataflow.planning.auto``, it makes one forecast at a low priority: standard input has the
pickled arguments of :func:`forecast`, standard output gets its answer as JSON.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from dataflow.errors import PipelineError, PolicyError
from dataflow.graph import Pipeline
from dataflow.planning.config import PlanConfig
from dataflow.planning.simulation import simulate
from dataflow.planning.sources.trace import of_trace
from dataflow.policy import PolicySchedule, SchedulingPolicy, divisors, expand
from dataflow.timeline.spans import Mark, Trace

REPLAN = 5
"""Steps from one plan to the next."""
GAIN = 0.03
"""The policy changes if the present one is predicted to take more than this share longer."""
NEAR = 0.005
"""Policies whose times differ by less count as equally fast, so that the least stale of them is taken."""
EQUAL = 0.002
"""The same for policies that are equally stale: of them the one with most parts is taken, which gains if a step has a
reward that takes longer than any so far."""
CHANGED = 0.25
"""Change of the mean logarithm of a step's latencies, beyond chance, after which steps before it count no more."""
OFF = 0.15
"""A policy whose steps take longer than predicted by more, beside those of other policies, is as slow as they were."""
MEASURED = 3
"""Steps that show a policy before a plan leaves it."""
LEAST_LEFT = 4
"""A run with fewer steps left plans no more."""
STEPS = 12
"""Steps of a window at most."""
MARKS = 20_000
"""Reward requests of a window at most, as they are sent to another process."""
REQUESTS = 40_000
"""Reward requests to simulate for each policy, about."""
SPLITS = 4
"""Numbers of parts to try, at most."""


def candidates(
    pipeline: Pipeline, mini_batches: int, groups: int | None, *, limit: int, order: str, streams: bool | None = None
) -> list[SchedulingPolicy]:
    """Returns the policies that a pipeline can run under; the one that overlaps most is the last.

    ``limit`` is the largest staleness. The rollout must stream (``streams`` True), must not (False) or may (None).
    """
    splits = divisors(mini_batches) if pipeline.collector is not None else [1]
    splits = [*splits[:1], *splits[1:][-SPLITS + 1 :]]  # few large parts gain little
    found = []
    for staleness in range(limit + 1):
        for stream in (False, True) if streams is None else (streams,):
            for split in splits:
                policy = SchedulingPolicy(split, staleness, order, stream and pipeline.streaming)  # type: ignore[arg-type]
                if policy in found:
                    continue
                try:
                    expand(pipeline, policy, 1, mini_batches, groups=groups)
                except (PolicyError, PipelineError):
                    continue  # it does not fit
                found.append(policy)
    return found


def opening(policies: Sequence[SchedulingPolicy]) -> PolicySchedule:
    """Returns the policies that a run begins with, from :func:`candidates`.

    Nothing overlaps its first step, whose weights nothing has trained; from the second one on as much as may does.
    """
    first = PolicySchedule(((1, policies[0]),))
    return first if len(policies) == 1 else first.switched(2, policies[-1])


# --- the last steps of a trace ----------------------------------------------------------------------------------------


def window(trace: Trace, since: int, last: int) -> Trace | None:
    """Returns the steps from ``since`` to ``last``, numbered from 1, at most :data:`STEPS`; None without tasks."""
    first = max(since, last - STEPS + 1)
    marks = _marks(trace, first, last)
    while first < last and len(marks) > MARKS:
        first += 1
        marks = [mark for mark in marks if mark.args["step"] >= first]
    recent = takewhile(lambda s: s.step > first - STEPS, reversed(trace.spans))
    spans = [replace(s, step=s.step - first + 1) for s in recent if first <= s.step <= last][::-1]
    if not spans:
        return None
    return Trace(
        spans,
        [replace(mark, args={**mark.args, "step": mark.args["step"] - first + 1}) for mark in marks],
        [level for level in trace.levels if level.at >= spans[0].begin],  # when the groups of a rollout ended
        # The policy changed within the run, so that the text after the step does not matter.
        meta={**trace.meta, "steps": last - first + 1, "status": "running"},
    )


def _marks(trace: Trace, first: int, last: int) -> list[Mark]:
    recent = takewhile(lambda mark: mark.args.get("step", last) > first - STEPS, reversed(trace.marks))
    return [mark for mark in recent if first <= mark.args.get("step", 0) <= last][::-1]


def latency_changed(trace: Trace, since: int, step: int) -> bool:
    """Whether the rewards of a step took longer or shorter than those of the two before it, by more than chance."""
    logs: dict[
        str, tuple[list[float], list[float]]
    ] = {}  # agent or its collecting stage -> of the step, of those before
    for mark in _marks(trace, max(since, step - 2), step):
        if mark.name == "reward" and 0 < mark.end - mark.begin < math.inf:
            agent = mark.args.get("collector", mark.resource)
            of = logs.setdefault(agent, ([], []))[mark.args["step"] < step]
            of.append(math.log(mark.end - mark.begin))

    def error(values: Sequence[float]) -> float:
        return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf

    return any(
        abs(statistics.fmean(now) - statistics.fmean(before)) > max(CHANGED, 4 * math.hypot(error(now), error(before)))
        for now, before in logs.values()
        if now and before
    )


# --- predictions ------------------------------------------------------------------------------------------------------


def forecast(found: Trace, policies: Sequence[SchedulingPolicy], limit: float | None = None) -> list[float | None]:
    """Returns the seconds a step under each policy, of a run that neither begins nor ends; None if it does not fit.

    Every policy sees the same latencies and stage times, so that their differences are more exact than the times.

    Args:
        found: the last steps of a run: :func:`window`.
        limit: requests in flight at most at present, if the agent adapts that number.
    """
    load = of_trace(found, "the run", PlanConfig())
    if limit is not None:
        load = replace(load, rewards=replace(load.rewards, concurrency=max(1, round(limit))))
    # The measured steps repeat without the first one. Each counts as often under every policy, as they may differ much.
    cycle = max(1, load.measured_steps - 1)
    most = max(8, min(16, REQUESTS // max(1, load.prompts * load.responses)))
    counted = cycle * max(-(-8 // cycle), most // cycle)

    def seconds(policy: SchedulingPolicy) -> float | None:
        filled = 2 + policy.max_staleness
        # The last steps have no next rollout beside them, so some more follow those that count.
        steps = filled + counted + policy.max_staleness + 1
        try:
            spans = simulate(replace(load, steps=steps), policy)[0].spans
        except (PolicyError, PipelineError):
            return None
        begin, end = (max(s.end for s in spans if s.step == at and not s.optional) for at in (filled, filled + counted))
        return (end - begin) / counted

    return [seconds(policy) for policy in policies]


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass
class PolicyChooser:
    """Decides when a run plans, and whether it changes its policy.

    Attributes:
        policies: that it may take, the least stale first, then by their parts.
        since: the first step of the windows; at first the run's second one, as the first includes the warm-up.
        shows: the first step whose time shows the present policy.
    """

    policies: Sequence[SchedulingPolicy]
    current: SchedulingPolicy
    since: int
    shows: int
    _planned: int = 0
    _due: bool = False
    _ends: dict[int, float] = field(default_factory=dict)
    _off: dict[SchedulingPolicy, float] = field(default_factory=dict)
    """The measured seconds a step of a policy over those predicted."""

    def ended(self, step: int, at: float, trace: Trace) -> bool:
        """Takes the end of a step, in seconds, and the trace so far; returns whether a plan is due."""
        self._ends[step] = at
        if step > self.since and latency_changed(trace, self.since, step):
            self.since, self._due = step, True
            self._off.clear()
        self._due = self._due or step >= max(self._planned + REPLAN, self.shows + MEASURED)
        return self._due

    def planned(self, step: int) -> None:
        """Takes that a plan after a step begins."""
        self._planned, self._due = step, False

    def decide(self, predicted: Mapping[SchedulingPolicy, float]) -> SchedulingPolicy | None:
        """Returns the policy to change to; None to keep the present one."""
        if self.current not in predicted:
            return None
        begun, last = max(self.shows, self.since), self._planned
        if last >= begun + MEASURED and begun in self._ends:
            took = (self._ends[last] - self._ends[begun]) / (last - begun)
            self._off[self.current] = took / predicted[self.current]
        usual = min(self._off.values(), default=1.0)
        wrong = {policy: off / usual for policy, off in self._off.items() if off > usual * (1 + OFF)}
        known = {policy: seconds * wrong.get(policy, 1.0) for policy, seconds in predicted.items()}
        # The fastest of the least stale policies that are about as fast as the fastest of all.
        near = min(known.values()) * (1 + NEAR)
        least = min(policy.max_staleness for policy, seconds in known.items() if seconds <= near)
        alike = {p: s for p, s in known.items() if p.max_staleness == least}
        equal = min(alike.values()) * (1 + EQUAL)
        best = next(policy for policy in reversed(self.policies) if alike.get(policy, math.inf) <= equal)
        if best == self.current:
            return None
        gains = known[self.current] > known[best] * (1 + GAIN)
        return best if gains or best.max_staleness < self.current.max_staleness else None

    def switched(self, step: int, policy: SchedulingPolicy) -> None:
        """Takes a change of policy from a step on; the next step's rollout is drawn beside it."""
        self.current, self.shows = policy, step + policy.max_staleness + 1


def main() -> None:
    os.nice(10)  # with more, it would starve where training keeps all cores busy
    print(json.dumps(forecast(*pickle.load(sys.stdin.buffer))))


if __name__ == "__main__":
    main()
