"""The critical path of a run as it was: the chain of tasks that its end hung on. Pure.

From the last training task back: each task began when the last thing it needed was there, which is the end of a task it
depended on, or of the one that had its slot before it.
"""

from __future__ import annotations

from bisect import bisect_right

from dataflow.timeline.spans import POOLS, Span, Trace, by_task


def critical_path(trace: Trace) -> list[Span]:
    """Returns the tasks on the critical path, in order of time.

    Of a task that streams, only the time until it had handed on what was waited for is on the path: a span that ends
    there. Tasks may overlap by what the clocks of two processes differ.

    Args:
        trace: of a run; ``meta["resources"]`` says where tasks wait for a slot.
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
        # Of two that ended together the dependency, which says more.
        at = max(found, key=lambda s: (s.end, s is dependency), default=None)
    return path[::-1]
