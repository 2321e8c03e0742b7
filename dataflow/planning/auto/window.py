"""The last steps of a run's own trace, which the next ones are expected to resemble. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from dataflow.timeline.spans import POOLS, Mark, Span, Trace

MOST = 12
"""Steps of a window at most."""
MARKS = 20_000
"""Reward requests of a window at most, as they are sent to another process."""
_CHANGED = 0.25
"""Change of a mean (of the logarithm) from one step to the later ones that is one of the run, not of chance."""


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
    steps = sorted(spans)
    if len(steps) > 1 and steps[0] == 1:
        steps = steps[1:]
    kept: list[int] = []
    for step in reversed(steps):
        if kept and _differs(step, kept, spans, marks):
            break
        kept.append(step)
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
    change = _change_of_latency(marks.get(step, ()), marks.get(last, ())) if step > last else 0.0
    return change > 0 or (whole and change < 0)


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


def _differs(step: int, later: Sequence[int], spans: dict[int, list[Span]], marks: dict[int, list[Mark]]) -> bool:
    """Whether the GPU work or the latency of a step differs from that of later ones by more than chance."""
    usual = statistics.fmean(map(_work, (spans[at] for at in later)))
    # One step may be an exception; a change shows in two steps before it and, if there are two, in two after it.
    both = [at for at in (step - 1, step) if at in spans]
    work = [_work(spans[at]) for at in both]
    if usual > 0 and min(work) > 0:
        logs = [math.log(seconds / usual) for seconds in work]
        if min(logs) > _CHANGED or max(logs) < -_CHANGED:
            return True
    near = later[-2:]  # a slow drift is no change
    changes = [_change_of_latency(marks.get(at, ()), marks.get(after, ())) for at in both for after in near]
    return min(changes) > 0 or max(changes) < 0


def _change_of_latency(these: Sequence[Mark], those: Sequence[Mark]) -> float:
    """Returns by how much the mean of the logarithm differs from that of others; 0 if it may do so by chance."""
    one, others = _logs(these), _logs(those)
    if len(one) < 2 or len(others) < 2:
        return 0.0
    spread = math.hypot(statistics.stdev(one) / len(one) ** 0.5, statistics.stdev(others) / len(others) ** 0.5)
    change = statistics.fmean(one) - statistics.fmean(others)
    return change if abs(change) > max(_CHANGED / 2, 4 * spread) else 0.0


def _work(spans: Sequence[Span]) -> float:
    """Returns the seconds of GPU work of a step."""
    return sum(s.end - s.begin for s in spans if s.resource in POOLS and not s.optional)


def _logs(marks: Sequence[Mark]) -> list[float]:
    return [math.log(m.end - m.begin) for m in marks if m.name == "reward" and m.end > m.begin]
