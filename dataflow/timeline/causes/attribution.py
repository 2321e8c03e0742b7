"""What the GPUs waited for. Pure: reads a trace and charges each idle second of a resource to one cause.

Each idle interval is followed backwards from the task that ends it. The time since that task's last dependency finished
is dispatch; the time that the dependency took is charged to the dependency's resource; and so on to the interval's
begin.
So if an update waited a millisecond for its advantages, and these ten seconds for rewards, the cause is rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dataflow.timeline import agents
from dataflow.timeline.spans import POOLS, Span, Trace, by_task, union


@dataclass(frozen=True)
class Wait:
    """An interval in which nothing ran on a resource.

    Attributes:
        begin, end: seconds from the run's first task.
        cause: "rewards", "weights", "controller", "io", "start-up", "dispatch", or another resource or stage by name,
            such as that of a further reward agent.
        task: the task that ended the wait.
        by: the task whose end was waited for, to which the time is charged; "" if there is none.
    """

    begin: float
    end: float
    cause: str
    task: str
    by: str = ""

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end - self.begin


def exposed_waits(trace: Trace, resource: str = "gpu", window: tuple[float, float] | None = None) -> list[Wait]:
    """Returns every wait of a resource, in order of time.

    Args:
        trace: of a run, finished or not.
        resource: to look at.
        window: (begin, end) in seconds; by default from the run's first task to the end of its last training task.

    Returns:
        Waits that do not overlap and cover all idle time of the window in which the run was running. An interval with
        several causes gives one wait for each. A wait ends where the run was killed, and another begins at the resume.
    """
    begin, end = window or trace.window
    # For a window near the end of a long run, only the spans near it are read.
    near = trace if window is None else Trace([s for s in trace.spans if s.end >= begin])
    charge = _Charge(trace, near, resource)
    return [wait for stretch in trace.stretches(begin, end) for wait in charge.waits(*stretch)]


def waits_after(trace: Trace, resource: str = "gpu") -> list[Wait]:
    """Returns the waits of a resource between the end of the last training task and the end of the last task.

    A late validation or checkpoint causes them. They are not exposed waits, which are only those of training.
    """
    begin, end = trace.window[1], trace.end
    return exposed_waits(trace, resource, (begin, end)) if end > begin else []


class _Charge:
    """Charges the idle time of a resource; ``near`` has at least the spans that end after its begin."""

    def __init__(self, trace: Trace, near: Trace, resource: str) -> None:
        self.trace, self.near, self.resource = trace, near, resource
        self.spans, self.known = near.on(resource), by_task(near.spans)
        self.placed, self.syncs, self.collects = trace.placed, trace.with_role("syncs"), trace.with_role("collects")
        self.first = min((s.begin for s in trace.spans if s.resource == resource), default=float("inf"))

    def waits(self, begin: float, end: float) -> list[Wait]:
        """Returns the waits of an interval without downtime."""
        starts: dict[float, Span] = {}
        for s in self.spans:
            # An empty span does not end an idle interval, as `union` leaves it out.
            if s.end > s.begin:
                starts.setdefault(s.begin, s)
        waits: list[Wait] = []
        at = begin
        for busy_from, busy_to in [*union((s.begin, s.end) for s in self.spans), (end, end)]:
            until = min(busy_from, end)
            if until > at:
                # Time before the first task on the resource is start-up; the window may begin within it.
                start_up = min(max(self.first, at), until)
                ended_by = starts.get(busy_from)
                if busy_from >= end and (last := self._last(end)) and (last.end == end or not ended_by):
                    ended_by = last
                if start_up > at:
                    waits.append(Wait(at, start_up, "start-up", ended_by.task if ended_by else ""))
                if until > start_up:
                    waits += self._walk(start_up, until, ended_by)
            at = max(at, min(busy_to, end))
        return waits

    def _last(self, end: float) -> Span | None:
        """Returns the last task of the window; it ends the window if no task on the resource does (a late write)."""
        late = end > self.trace.window[1]
        closing = [s for s in self.near.spans if (late or not s.optional) and s.end <= end]
        return max(closing, key=lambda s: (s.end, s.step, s.stage, s.part), default=None)

    def _find(self, name: str) -> Span | None:
        if name in self.known or self.near is self.trace:
            return self.known.get(name)
        stage = name.partition("[")[0]
        return next((s for s in self.trace.spans if s.stage == stage and s.task == name), None)

    def _cause(self, stage: str, where: str) -> str:
        if where == self.resource:
            return "dispatch"
        # The cause is "weights" on whichever resource they are gathered and loaded.
        return "weights" if stage in self.syncs else agents.cause_of(where)

    def _walk(self, begin: float, end: float, span: Span | None) -> list[Wait]:
        """Splits an interval by cause, from its end back to its begin along the last dependency of each task."""
        name = span.task if span else ""
        cause, by = (self._cause(span.stage, span.resource), name) if span else ("dispatch", "")
        pieces: list[Wait] = []
        seen = {name}
        at, task = end, span
        while at > begin:
            before = self._find(task.waited_for) if task else None
            if before is None or before.task in seen:
                stage = task.waited_for.partition("[")[0] if task else ""
                if task and stage and before is None:
                    # It left no span: the rest of the interval is charged to it, on the resource of its stage.
                    cause, by = self._cause(stage, self.placed.get(stage, stage)), task.waited_for
                pieces.append(Wait(begin, at, cause, name, by))
                break
            seen.add(before.task)
            done = min(max(before.end, begin), at)
            if done < at:
                pieces.append(Wait(done, at, cause, name, by))
            at, task, cause, by = done, before, self._cause(before.stage, before.resource), before.task
        merged: list[Wait] = []
        for piece in reversed(pieces):
            # Consecutive pieces of one cause are one wait, charged to the task that ended it. But waits for the rewards
            # of two agents are apart, so that each is charged to its own.
            if merged and merged[-1].cause == piece.cause and self._may_join(merged[-1], piece):
                merged[-1] = replace(piece, begin=merged[-1].begin)
            else:
                merged.append(piece)
        return merged

    def _may_join(self, one: Wait, other: Wait) -> bool:
        stages = {wait.by.partition("[")[0] for wait in (one, other)}
        return len(stages) == 1 or (one.cause != agents.cause_of(agents.MAIN) and stages.isdisjoint(self.collects))


def pool_waits(
    trace: Trace, window: tuple[float, float] | None = None, pools: Sequence[str] | None = None
) -> dict[str, float]:
    """Returns {cause: seconds that the GPUs waited}; the mean over several pools, so that it is a share of the time.

    Args:
        trace: of a run, finished or not.
        window: see :func:`exposed_waits`.
        pools: of GPUs; None for all that the trace shows.
    """
    pools = (trace.pools or POOLS[:1]) if pools is None else pools
    by_cause: dict[str, float] = {}
    for pool in pools:
        for wait in exposed_waits(trace, pool, window):
            by_cause[wait.cause] = by_cause.get(wait.cause, 0.0) + wait.seconds / len(pools)
    return by_cause


def _work_s(trace: Trace, resource: str) -> float:
    """Returns the seconds of all training tasks on a resource, one after the other."""
    return sum(
        s.end - s.begin for s in trace.spans if s.resource == resource and s.stage not in trace.with_role("validates")
    )


def summary(trace: Trace) -> dict[str, Any]:
    """Returns the run's numbers, JSON-able; times in seconds.

    Returns:
        ``wall_s`` (first task to last training task, without the time in which the run was not running), ``resumed``
        (steps of the checkpoints from which it resumed), ``not_running_s`` (from each kill to the resume, together),
        ``step_s`` (wall time per complete step), ``after_training_s``
        (from the last training task to the last task of all, such as a late validation), ``after_training_idle_s``
        (idle time of the GPUs in it), ``gpu_busy_s``, ``exposed_wait_s``, ``exposed_wait_by_cause`` {cause: seconds},
        ``busy`` {resource: share of the wall time}, ``stages`` {stage: {"total_s", "count"}}. Busy time and exposed
        wait are means over the GPU pools, and add up to the wall time. If the trace has its job, also
        ``lower_bound_s`` (the GPUs' busy time, or that of the slots that rewards take, which no order of the tasks can
        beat), and if the run knows how many reward requests it had in flight, ``reward_service_s`` (time of the
        requests at full concurrency; of several agents, the longest), which is a bound, too.
    """
    by_cause, pools = pool_waits(trace), trace.pools or POOLS[:1]
    stages: dict[str, dict[str, float]] = {}
    for span in trace.spans:
        of = stages.setdefault(span.stage, {"total_s": 0.0, "count": 0})
        of["total_s"] += max(0.0, span.end - span.begin)
        of["count"] += 1
    wall, trained, until = trace.wall, trace.window[1], trace.end
    busy = sum(map(trace.busy, pools)) / len(pools)
    bounds: dict[str, float] = {}
    if job := trace.meta.get("job"):
        # A judge of the user's own may have slots, which its stages take.
        asking = {trace.placed.get(stage) for role in ("requests", "collects") for stage in trace.with_role(role)}
        slots = {on: most for on, most in (trace.meta.get("resources") or {}).items() if most and on in asking}
        bounds["lower_bound_s"] = max([busy, *(_work_s(trace, on) / most for on, most in slots.items())])
    if (job or {}).get("concurrency"):
        work: dict[str, float] = {}
        for mark in trace.marks:
            if not mark.args.get("validation"):
                work[mark.resource] = work.get(mark.resource, 0.0) + mark.end - mark.begin
        each = [seconds / (agents.concurrency_of(trace, agent) or 1) for agent, seconds in work.items()]
        service = max(each, default=0.0)  # agents work beside each other
        bounds |= {"reward_service_s": service, "lower_bound_s": max(bounds["lower_bound_s"], service)}
    return {
        "wall_s": wall,
        "resumed": trace.resumed,
        "not_running_s": sum(down.seconds for down in trace.downtimes),
        "step_s": _step_s(trace),
        "after_training_s": trace.running_s(trained, until),
        "after_training_idle_s": sum(w.seconds for pool in pools for w in waits_after(trace, pool)) / len(pools),
        "gpu_busy_s": busy,
        "exposed_wait_s": sum(by_cause.values()),
        "exposed_wait_by_cause": dict(sorted(by_cause.items(), key=lambda item: (-item[1], item[0]))),
        "busy": {name: trace.busy(name) / wall if wall > 0 else 0.0 for name in trace.resources},
        **bounds,
        "stages": {name: stages[name] for name in trace.stages},
    }


def _step_s(trace: Trace) -> float:
    """Returns the seconds per complete step, up to the end of the last one."""
    whole = set(trace.whole_steps)
    if not whole:
        return 0.0
    end = max(s.end for s in trace.spans if s.step in whole and not s.optional)
    return trace.running_s(trace.window[0], end) / len(whole)
