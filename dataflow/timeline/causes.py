"""What the GPUs waited for, and for whom. Pure: reads a trace and charges each idle second of a resource to one cause.

Each idle interval is followed backwards from the task that ends it. The time since that task's last dependency finished
is dispatch; the time that the dependency took is charged to the dependency's resource; and so on to the interval's
begin. So if an update waited a millisecond for its advantages, and these ten seconds for rewards, the cause is rewards.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from dataflow.errors import counted
from dataflow.timeline import agents
from dataflow.timeline.spans import POOLS, Mark, Span, Trace, by_task, union

_TASK = re.compile(r"^(?P<stage>.+)\[(?P<step>\d+)(?:\.(?P<part>\d+))?\]$")
_QUEUED_FOR = {"slot": "a free slot", "rate": "the rate limit", "pause": "the service's Retry-After"}
"""What a request queued for at the end of its time in the queue."""


@dataclass(frozen=True)
class Wait:
    """An interval, in seconds from the run's first task, in which nothing ran on a resource.

    Attributes:
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
    """Returns every wait of a resource, in order of time; the run need not be finished.

    The waits do not overlap and cover all idle time of the window, by default from the run's first task to the end of
    its last training task. An interval with several causes gives one wait for each. A wait ends where the run was
    killed, and another begins at the resume.
    """
    begin, end = window or trace.window
    charge = _Charge(trace, resource)
    edges = [begin, *(gap.at for gap in trace.gaps if begin < gap.at < end), end]
    return [wait for one, other in pairwise(edges) for wait in charge.waits(one, other)]


class _Charge:
    """Charges the idle time of a resource."""

    def __init__(self, trace: Trace, resource: str) -> None:
        self.trace, self.resource = trace, resource
        self.spans, self.known = trace.on(resource), by_task(trace.spans)
        self.placed, self.syncs, self.collects = trace.placed, trace.with_role("syncs"), trace.with_role("collects")
        self.first = min((s.begin for s in self.spans), default=float("inf"))
        self.starts: dict[float, Span] = {}
        for s in self.spans:
            # An empty span does not end an idle interval, as `union` leaves it out.
            if s.end > s.begin:
                self.starts.setdefault(s.begin, s)

    def waits(self, begin: float, end: float) -> list[Wait]:
        """Returns the waits of an interval."""
        waits: list[Wait] = []
        at = begin
        for busy_from, busy_to in [*union((s.begin, s.end) for s in self.spans), (end, end)]:
            until = min(busy_from, end)
            if until > at:
                # Time before the first task on the resource is start-up; the window may begin within it.
                start_up = min(max(self.first, at), until)
                ended_by = self.starts.get(busy_from)
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
        closing = [s for s in self.trace.spans if not s.optional and s.end <= end]
        return max(closing, key=lambda s: (s.end, s.step, s.stage, s.part), default=None)

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
            before = self.known.get(task.waited_for) if task else None
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

    ``window`` is that of :func:`exposed_waits`; ``pools`` are all that the trace shows by default.
    """
    pools = (trace.pools or POOLS[:1]) if pools is None else pools
    by_cause: dict[str, float] = {}
    for pool in pools:
        for wait in exposed_waits(trace, pool, window):
            by_cause[wait.cause] = by_cause.get(wait.cause, 0.0) + wait.seconds / len(pools)
    return by_cause


def summary(trace: Trace) -> dict[str, Any]:
    """Returns the run's numbers, JSON-able; times in seconds.

    Returns:
        ``wall_s`` (first task to last training task, without the time in which the run was not running), ``resumed``
        (steps of the checkpoints from which it resumed), ``not_running_s`` (from each kill to the resume, together),
        ``step_s`` (wall time per complete step), ``after_training_s`` (from the last training task to the last task of
        all, such as a late validation), ``gpu_busy_s``,
        ``exposed_wait_s``, ``exposed_wait_by_cause`` {cause: seconds}, ``busy`` {resource: share of the wall time},
        ``stages`` {stage: {"total_s", "count"}}. Busy time and exposed wait are means over the GPU pools, and add up to
        the wall time. If the trace has its job, also ``lower_bound_s``, which no order of the tasks can beat: the GPUs'
        busy time or, if the run knows how many reward requests it had in flight, ``reward_service_s`` (time of the
        requests at full concurrency; of several agents, the longest).
    """
    by_cause, pools = pool_waits(trace), trace.pools or POOLS[:1]
    stages: dict[str, dict[str, float]] = {}
    for span in trace.spans:
        of = stages.setdefault(span.stage, {"total_s": 0.0, "count": 0})
        of["total_s"] += max(0.0, span.end - span.begin)
        of["count"] += 1
    wall, whole = trace.wall, set(trace.whole_steps)
    ended = max((s.end for s in trace.spans if s.step in whole and not s.optional), default=0.0)
    busy = sum(map(trace.busy, pools)) / len(pools)
    return {
        "wall_s": wall,
        "resumed": trace.resumed,
        "not_running_s": sum(gap.seconds for gap in trace.gaps),
        "step_s": (ended - trace.window[0]) / len(whole) if whole else 0.0,
        "after_training_s": trace.end - trace.window[1],
        "gpu_busy_s": busy,
        "exposed_wait_s": sum(by_cause.values()),
        "exposed_wait_by_cause": dict(sorted(by_cause.items(), key=lambda item: (-item[1], item[0]))),
        "busy": {name: trace.busy(name) / wall if wall > 0 else 0.0 for name in trace.resources},
        **_bounds(trace, busy),
        "stages": {name: stages[name] for name in trace.stages},
    }


def _bounds(trace: Trace, busy: float) -> dict[str, float]:
    """Returns the lower bounds on the run's time, as far as its trace shows them."""
    if not (job := trace.meta.get("job")):
        return {}
    if not job.get("concurrency"):
        return {"lower_bound_s": busy}
    asked: dict[str, float] = {}
    for mark in trace.marks:
        if not mark.args.get("validation"):
            asked[mark.resource] = asked.get(mark.resource, 0.0) + mark.end - mark.begin
    each = [seconds / (agents.concurrency_of(trace, agent) or 1) for agent, seconds in asked.items()]
    service = max(each, default=0.0)  # agents work beside each other
    return {"lower_bound_s": max(busy, service), "reward_service_s": service}


# --- who came last ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Culprit:
    """What one wait was for: the task or, for rewards, the last request to end.

    Attributes:
        step: of the task that was waited for; None if there was none (start-up).
        request: for rewards, the last to end of the requests waited for, if the trace has it.
    """

    wait: Wait
    pool: str
    step: int | None = None
    request: Mark | None = field(default=None, hash=False)

    @property
    def words(self) -> str:
        """A description for people: ``step 12, group 17, 3 tries``."""
        if self.step is None:
            return ""
        words = [f"step {self.step}"]
        if self.request is None:
            if self.wait.cause not in ("rewards", "dispatch"):
                words.append(self.wait.by.partition("[")[0])
            return ", ".join(words)
        facts = self.request.args
        if facts.get("validation"):
            words.append("evaluation")
        if collector := facts.get("collector"):
            words.append(str(collector))
        words.append(f"group {facts.get('group')}")
        if facts.get("tries", 1) > 1:
            words.append(f"{facts['tries']} tries")
        if throttled := facts.get("throttled"):
            words.append(f"throttled {counted(throttled, 'time')}")
        if "queued_s" in facts:
            words.append(f"queued {facts['queued_s']:.1f} s")
            if (last := _QUEUED_FOR.get(facts.get("held_by", ""))) is not None:
                words[-1] += f", at last for {last}"
        if how := facts.get("how"):
            words.append(str(how))
        return ", ".join(words)

    @property
    def place(self) -> tuple[int, int] | None:
        """Step and group of a training request; None for an evaluation's, for none, or if the trace lacks them."""
        if self.request is None or self.request.args.get("validation"):
            return None
        step, group = self.request.args.get("step"), self.request.args.get("group")
        return (step, group) if isinstance(step, int) and isinstance(group, int) else None

    def as_dict(self) -> dict[str, Any]:
        """Returns it JSON-able: ``seconds`` of the wait, and the facts of the request from the trace."""
        facts = {} if self.request is None else dict(self.request.args)
        wait = self.wait
        own = {"pool": self.pool, "cause": wait.cause, "seconds": wait.seconds, "begin_s": wait.begin}
        return {**own, "task": wait.task, "waited_for": wait.by, **facts, "step": self.step}


def culprits(trace: Trace, pools: Sequence[str] | None = None) -> list[Culprit]:
    """Returns a culprit per wait of the GPUs (:func:`exposed_waits`), longest first.

    ``pools`` are all that the trace shows by default.
    """
    last: dict[tuple[str, int, int | None], Mark] = {}
    """(collecting stage, "validation" or "" for any; step; part, None for any) -> the last request to end."""
    for mark in trace.marks:
        step, part = mark.args.get("step", 0), mark.args.get("part")
        whose = ("validation",) if mark.args.get("validation") else ("", mark.args.get("collector", ""))
        for key in ((of, step, some) for of in whose for some in (part, None)):
            if key not in last or mark.end > last[key].end:
                last[key] = mark
    collectors, validates = {of for of, _step, _part in last}, trace.with_role("validates")
    asked = agents.reward_causes_of(trace)
    found: list[Culprit] = []
    for pool in (trace.pools or POOLS[:1]) if pools is None else pools:
        for wait in exposed_waits(trace, pool):
            if (task := _TASK.match(wait.by)) is None:
                found.append(Culprit(wait, pool))
                continue
            step, part, stage = int(task["step"]), int(task["part"] or 1) - 1, task["stage"]
            of = "validation" if stage in validates else stage if stage in collectors else ""
            request = last.get((of, step, part)) or last.get((of, step, None))
            found.append(Culprit(wait, pool, step, request if wait.cause in asked else None))
    return sorted(found, key=lambda c: (-c.wait.seconds, c.wait.begin, c.pool))


def linked(trace: Trace) -> list[tuple[int, int]]:
    """Returns (step, group) of the requests for which GPUs waited, the longest wait first."""
    return list(dict.fromkeys(c.place for c in culprits(trace) if c.place is not None))


# --- the critical path ------------------------------------------------------------------------------------------------


def critical_path(trace: Trace) -> list[Span]:
    """Returns the chain of tasks that determined when the run ended, in order of time.

    It is followed backwards from the last training task. Each task began when the last thing it needed was available:
    the output of the last dependency, or the slot that another task had occupied, of a resource that
    ``meta["resources"]`` limits. Of a streaming task, only the time until it emitted the chunk that was waited for is
    on the path. Tasks may overlap by the difference between the clocks of two processes.
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
