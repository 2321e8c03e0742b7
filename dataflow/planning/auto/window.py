"""The last steps of a run's own trace, which the next ones are expected to resemble. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple, TypeAlias

from dataflow.timeline.spans import POOLS, Mark, Span, Trace

MOST = 12
"""Steps of a window at most."""
MARKS = 20_000
"""Reward requests of a window at most, as they are sent to another process."""
_CHANGED = 0.25
"""Change of a mean (of the logarithm) from one step to the later ones that is one of the run, not of chance."""


class Latency(NamedTuple):
    """The logarithms of the latencies of some requests.

    Attributes:
        number: of the requests.
        mean: of the logarithms.
        squares: sum of their squared differences from the mean.
    """

    number: int
    mean: float
    squares: float

    @classmethod
    def of(cls, logs: Sequence[float]) -> Latency:
        mean = statistics.fmean(logs)
        return cls(len(logs), mean, math.fsum((log - mean) ** 2 for log in logs))

    def joined(self, other: Latency) -> Latency:
        """Returns the latencies of both."""
        number, apart = self.number + other.number, other.mean - self.mean
        squares = self.squares + other.squares + apart**2 * self.number * other.number / number
        return Latency(number, self.mean + apart * other.number / number, squares)

    @property
    def error(self) -> float:
        """The standard error of the mean; infinite for a single request."""
        return math.sqrt(self.squares / (self.number - 1) / self.number) if self.number > 1 else math.inf


Latencies: TypeAlias = Mapping[str, Latency]
"""By agent."""


def window(trace: Trace, last: int, rewards_of: int | None = None) -> Trace | None:
    """Returns the steps up to ``last`` that resemble it, numbered from 1; None if no step is whole.

    Steps before a change of the GPU work or of the rewards' latency are left out, and so is the first step of the run
    if there are others: it includes the warm-up.

    Args:
        trace: of the run, which may have steps after ``last``.
        last: a step whose training has ended.
        rewards_of: a later step; the latencies of its rewards replace those of the other steps.
    """
    recent = list(takewhile(lambda s: s.step > last - 2 * MOST, reversed(trace.spans)))
    spans: dict[int, list[Span]] = {}
    for span in reversed(recent):
        if last - MOST < span.step <= last:
            spans.setdefault(span.step, []).append(span)
    marks = _marks(trace, last)
    latencies = {step: _latencies(of) for step, of in marks.items()}
    steps = sorted(spans)
    if len(steps) > 1 and steps[0] == 1:
        steps = steps[1:]
    kept: list[int] = []
    usual: list[int] = []  # the kept ones but for exceptions
    for step in reversed(steps):
        near = _together([latencies.get(at, {}) for at in usual[-2:]])  # a slow drift is no change
        if _differs_in_work(step, kept, spans) or _differs_in_latency(step, near, latencies):
            break
        kept.append(step)
        if not _changes(latencies.get(step, {}), near):
            usual.append(step)
        if sum(len(marks.get(at, ())) for at in kept) > MARKS:
            break
    if not kept:
        return None
    if rewards_of is not None:
        marks = {last: _marks(trace, rewards_of).get(rewards_of, [])}
    first = min(kept)
    begin = min(s.begin for step in kept for s in spans[step])
    number = {step: step - first + 1 for step in kept}
    return Trace(
        [replace(s, step=number[step]) for step in sorted(kept) for s in spans[step]],
        [replace(m, args={**m.args, "step": number[step]}) for step in sorted(kept) for m in marks.get(step, ())],
        [level for level in trace.levels if level.at >= begin],
        # Its policy changed within the run, so that the text after the step does not matter.
        meta={**trace.meta, "steps": len(kept), "status": "running"},
    )


def latency_changed(trace: Trace, step: int, last: int, whole: bool) -> bool:
    """Whether the rewards of a step took longer or shorter than those of the step ``last``, by more than chance.

    Args:
        trace: of the run.
        step: some of whose rewards are there.
        last: a step whose training has ended.
        whole: whether all of its rewards are there; the first to arrive can only show that the service is slower.
    """
    marks = _marks(trace, step)
    if step <= last:
        return False
    changes = _changes(_latencies(marks.get(step, ())), _latencies(marks.get(last, ())))
    return any(whole or change > 0 for change in changes.values())


def step_ends(trace: Trace) -> dict[int, float]:
    """Returns when the training of each step ended, in seconds."""
    ends: dict[int, float] = {}
    for span in trace.spans:
        if not span.optional:
            ends[span.step] = max(ends.get(span.step, 0.0), span.end)
    return ends


def _marks(trace: Trace, last: int) -> dict[int, list[Mark]]:
    found: dict[int, list[Mark]] = {}
    for mark in takewhile(lambda m: m.args.get("step", last) > last - 2 * MOST, reversed(trace.marks)):
        step = mark.args.get("step", 0)
        if last - MOST < step <= last:
            found.setdefault(step, []).append(mark)
    return found


def _differs_in_work(step: int, later: Sequence[int], spans: dict[int, list[Span]]) -> bool:
    """Whether the GPU work of a step, and that of the step before, differs from that of later ones."""
    both = [_work(spans[at]) for at in (step - 1, step) if at in spans]
    usual = statistics.fmean(_work(spans[at]) for at in later) if later else 0.0
    if not usual or not min(both):
        return False
    logs = [math.log(work / usual) for work in both]
    return min(logs) > _CHANGED or max(logs) < -_CHANGED


def _differs_in_latency(step: int, near: Latencies, latencies: Mapping[int, Latencies]) -> bool:
    """Whether a step and the one before it both differ from later ones in an agent's latency, by more than chance."""
    mine, before = latencies.get(step, {}), latencies.get(step - 1, {})
    if not before:
        return bool(_changes(mine, near))
    one, other = _changes(mine, near, sure=False), _changes(before, near, sure=False)
    return any(
        change * one.get(agent, 0.0) > 0 and change * other.get(agent, 0.0) > 0
        for agent, change in _changes(_together([before, mine]), near).items()
    )


def _changes(these: Latencies, those: Latencies, sure: bool = True) -> dict[str, float]:
    """Returns by how much the mean of the logarithm of latencies differs from that of others, by agent.

    Args:
        these: of some requests.
        those: of others.
        sure: whether to leave out what may be chance.
    """
    found = {}
    for agent in these.keys() & those.keys():
        ours, theirs = these[agent], those[agent]
        chance = 4 * math.hypot(ours.error, theirs.error) if sure else 0.0
        if abs(change := ours.mean - theirs.mean) > max(_CHANGED / 2, chance):
            found[agent] = change
    return found


def _work(spans: Sequence[Span]) -> float:
    """Returns the seconds of GPU work of a step."""
    return sum(s.end - s.begin for s in spans if s.resource in POOLS and not s.optional)


def _latencies(marks: Sequence[Mark]) -> Latencies:
    """Returns the latencies of each agent, or of the stage that collects from it."""
    logs: dict[str, list[float]] = {}
    for m in marks:
        if m.name == "reward" and 0 < m.end - m.begin < math.inf:
            logs.setdefault(m.args.get("collector", m.resource), []).append(math.log(m.end - m.begin))
    return {agent: Latency.of(of) for agent, of in logs.items()}


def _together(each: Sequence[Latencies]) -> Latencies:
    found: dict[str, Latency] = {}
    for latencies in each:
        for agent, one in latencies.items():
            found[agent] = found[agent].joined(one) if agent in found else one
    return found
