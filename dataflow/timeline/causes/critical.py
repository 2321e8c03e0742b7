"""The critical path of a run: the chain of tasks that determined when it ended. Pure.

It is followed backwards from the last training task. Each task began when the last thing it needed was available: the
output of the last dependency, or the slot that another task had occupied.
"""

from __future__ import annotations

from bisect import bisect_right

from dataflow.timeline.spans import POOLS, Span, Trace, by_task


def critical_path(trace: Trace) -> list[Span]:
    """Returns the tasks on the critical path, in order of time.

    Of a streaming task, only the time until it emitted the chunk that was waited for is on the path. Tasks may overlap
    by the difference between the clocks of two processes.

    Args:
        trace: of a run; ``meta["resources"]`` gives the resources with a limited number of slots.
    """
    slots = trace.meta.get("resources") or {}
    known = by_task(trace.spans)
    before = {
        name: sorted((s for s in trace.spans if s.resource == name), key=lambda s: (s.end, s.begin, s.task))
        for name in trace.resources
        if slots.get(name) is not None or (not slots and name in POOLS)
    }
    ends = {name: [s.end for s in spans] for name, spans in before.items()}
    at = max((s for s in trace.spans if not s.optional), key=lambda s: (s.end, s.begin, s.task), default=None)
    path: list[Span] = []
    seen: set[str] = set()
    while at is not None and at.task not in seen:
        path.append(at)
        seen.add(at.task)
        dependency, holder = known.get(at.waited_for), None
        if at.resource in before and (ended := bisect_right(ends[at.resource], at.begin)):
            holder = before[at.resource][ended - 1]
        found = [s for s in (holder, dependency) if s is not None and s.task not in seen]
        # Prefer the dependency if both ended together, since it explains more.
        at = max(found, key=lambda s: (s.end, s is dependency), default=None)
    return path[::-1]
