"""Spans, marks and the trace they form. Pure: reads no clock; times are seconds from the run's first task.

Everything that shows or analyses a run (causes, Perfetto, text, picture, planner) starts from a Trace. The time between
a kill and the resume takes no place in it: the tasks after the resume follow those before the kill.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dataflow.drawing.duration import seconds as duration
from dataflow.graph import TaskId


@dataclass(frozen=True)
class Span:
    """What one task occupied: steps count from 1, parts from 0, times are seconds from the run's first task.

    Attributes:
        args: facts about it, JSON-able (``weights_version``, ``samples``); ``optional`` marks a task that is not part
            of training (validation).
        waited_for: the last of its dependencies to finish, as ``str(TaskId)`` writes it, or "".
    """

    stage: str
    step: int
    part: int
    parts: int
    resource: str
    begin: float
    end: float
    args: dict[str, Any] = field(default_factory=dict, hash=False)
    waited_for: str = ""

    @property
    def task(self) -> str:
        """Its name, in the form of ``waited_for``."""
        return str(TaskId(self.step, self.stage, self.part, self.parts))

    @property
    def label(self) -> str:
        """Its short label: the step, and the part counted from 1 if there are several.

        >>> Span("actor_update", 3, 0, 4, "gpu", 0.0, 1.0).label
        '3.1'
        """
        return str(self.step) if self.parts == 1 else f"{self.step}.{self.part + 1}"

    @property
    def optional(self) -> bool:
        """Whether training does not need it (validation)."""
        return bool(self.args.get("optional"))


@dataclass(frozen=True, slots=True)  # a run has millions
class Mark:
    """An interval inside a task that takes no slot: a reward request of a step, group and sample."""

    name: str
    resource: str
    begin: float
    end: float
    args: dict[str, Any] = field(default_factory=dict, hash=False)


def called(facts: Mapping[str, Any]) -> bool:
    """Whether the request of a mark was answered by a call of its own, so that its duration is the service's."""
    return facts.get("how", "") in ("", "hedged")


@dataclass(frozen=True, slots=True)
class Level:
    """The value of a varying number (a limit) from the time ``at`` on, in seconds from the run's first task."""

    name: str
    at: float
    value: float


USUAL = {
    "rollout": ("samples", "gpu"),
    "reward_request": ("requests", "controller"),
    "reward_collect": ("collects", "reward"),
    "old_log_prob": ("", "gpu"),
    "ref_log_prob": ("", "gpu"),
    "advantage": ("", "controller"),
    "actor_update": ("trains", "gpu"),
    "gather_weights": ("syncs", "gpu"),
    "sync_weights": ("syncs", "gpu"),
    "val_rollout": ("validates", "gpu"),
    "val_score": ("validates", "reward"),
    "write_samples": ("", "io"),
    "write_val_samples": ("validates", "io"),
    "stage_checkpoint": ("saves", "gpu"),
    "keep_samples": ("saves", "io"),
    "write_checkpoint": ("saves", "io"),
    "checkpoint": ("saves", "gpu"),  # of a plan from costs or from verl's log, where it stops the GPUs
    "save_checkpoint": ("saves", "gpu"),
}
"""Role and resource of stages by name, for traces that were made without a pipeline."""

UNFINISHED = ("running", "interrupted", "failed", "cut off")
"""Statuses of a trace whose last steps may be incomplete."""

POOLS = ("gpu", "rollout", "train")
"""Resources that are GPUs: ``gpu`` of a colocated run, the others of a disaggregated one."""


class Gap(NamedTuple):
    """Where a run was killed and resumed.

    Attributes:
        at: seconds from the run's first task, without the time in which it was not running.
        seconds: in which it was not running, the work that was lost included.
        why: how it resumed, in words.
    """

    at: float
    seconds: float
    why: str

    @property
    def words(self) -> str:
        """A description for people.

        >>> Gap(40, 11520, "resumed from step 12").words
        'not running 3 h 12 min, resumed from step 12'
        """
        return f"not running {duration(self.seconds)}, {self.why}"


@dataclass
class Trace:
    """All spans of a run.

    Attributes:
        spans: in the order they were added (usually that of their ends).
        marks: reward requests.
        levels: changes of limits.
        meta: ``policy``, ``steps``, ``seed``, ``status`` ("running", "finished", "interrupted", "failed", or "cut off"
            for a file without its end, where ``cut`` describes what is missing), ``resources`` {name: slots, None for
            any number}, ``started`` (unix time of second 0); of a run that was resumed, ``gaps``
            [[at, seconds, why], ...] (:class:`Gap`) and ``resumed`` [step of the checkpoint, ...].
        sink: called with all items after they are added, for example to write them to a file.
    """

    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    sink: Callable[..., None] | None = field(default=None, repr=False, compare=False)

    def add(self, *items: Span | Mark | Level) -> None:
        """Adds spans, marks and levels; one call per task, so that the sink gets all of a task or nothing."""
        for item in items:
            if isinstance(item, Span):
                self.spans.append(item)
            elif isinstance(item, Mark):
                self.marks.append(item)
            else:
                self.levels.append(item)
        if self.sink is not None:
            self.sink(*items)

    @property
    def window(self) -> tuple[float, float]:
        """Begin and end of training in seconds: from the first task to the last one that is not optional."""
        begin = min((s.begin for s in self.spans), default=0.0)
        end = max((s.end for s in self.spans if not s.optional), default=begin)
        return begin, max(begin, end)

    @property
    def wall(self) -> float:
        """Seconds of :attr:`window`."""
        begin, end = self.window
        return end - begin

    @property
    def gaps(self) -> list[Gap]:
        """Where the run was killed and resumed, in order."""
        return [Gap(*each) for each in self.meta.get("gaps") or ()]

    @property
    def resumed(self) -> list[int]:
        """Steps of the checkpoints from which the run resumed."""
        return list(self.meta.get("resumed") or ())

    @property
    def resources(self) -> list[str]:
        """Resources that were used, in the order of ``meta["resources"]``, then of first use."""
        seen = dict.fromkeys([s.resource for s in self.spans] + [m.resource for m in self.marks])
        declared = [name for name in self.meta.get("resources") or {} if name in seen]
        return list(dict.fromkeys([*declared, *seen]))

    @property
    def end(self) -> float:
        """End of the last task, optional ones included: a late validation ends after :attr:`window`."""
        return max([self.window[1], *(s.end for s in self.spans)])

    @property
    def steps(self) -> int:
        """Number of steps that are complete."""
        return len(self.whole_steps)

    @property
    def whole_steps(self) -> list[int]:
        """The steps whose training tasks have all ended, in order; all steps if the run finished."""
        training = [s for s in self.spans if not s.optional]
        steps = sorted({s.step for s in training})
        if self.meta.get("status", "finished") not in UNFINISHED:
            return steps
        needed = {stage["name"] for stage in self.declared if stage.get("every") is None} | {s.stage for s in training}
        # The number of parts may change with the policy.
        left: dict[tuple[int, str], int] = {}
        for s in training:
            left[s.step, s.stage] = left.get((s.step, s.stage), s.parts) - 1
        return [step for step in steps if all(left.get((step, name), 1) <= 0 for name in needed)]

    @property
    def trained(self) -> tuple[float, int]:
        """Seconds running, and steps; of an unfinished run those until its last whole step ended, if it has one."""
        if not (whole := self.whole_steps) or self.meta.get("status", "finished") not in UNFINISHED:
            return self.wall, int(self.meta.get("steps") or max((s.step for s in self.spans), default=0))
        end = max(s.end for s in self.spans if not s.optional and s.step <= whole[-1])
        return end - self.window[0], len(whole)

    @property
    def declared(self) -> list[dict[str, Any]]:
        """The stages of the run's pipeline, as ``Pipeline.facts`` returns them; empty if the trace has none."""
        return list(((self.meta.get("job") or {}).get("pipeline") or {}).get("stages") or ())

    @property
    def placed(self) -> dict[str, str]:
        """The resource of each stage, including stages without a span."""
        declared = {s["name"]: s["on"] for s in self.declared} or {name: on for name, (_, on) in USUAL.items()}
        return declared | {s.stage: s.resource for s in self.spans}

    @property
    def roles(self) -> dict[str, str]:
        """The role of each stage that has one, from the pipeline; without a pipeline, the usual role of its name."""
        declared = self.declared
        if declared:
            return {s["name"]: s["role"] for s in declared if s.get("role")}
        return {name: role for name, (role, _) in USUAL.items() if role}

    def with_role(self, role: str) -> frozenset[str]:
        """Returns the names of the stages with a role."""
        return frozenset(name for name, of in self.roles.items() if of == role)

    @property
    def stages(self) -> list[str]:
        """Stages that ran, in order of their first begin."""
        return list(dict.fromkeys(s.stage for s in sorted(self.spans, key=lambda s: (s.begin, s.step, s.stage))))

    @property
    def pools(self) -> list[str]:
        """The GPU pools among the resources: one if engine and trainer share it, else one for each."""
        return [name for name in self.resources if name in POOLS]

    def on(self, resource: str) -> list[Span]:
        """Returns the spans on a resource, by begin; ties are decided by step, stage and part."""
        chosen = [s for s in self.spans if s.resource == resource]
        return sorted(chosen, key=lambda s: (s.begin, s.end, s.step, s.stage, s.part))

    def busy(self, resource: str) -> float:
        """Returns the seconds of :attr:`window` in which at least one task was on the resource."""
        return covered(((s.begin, s.end) for s in self.spans if s.resource == resource), *self.window)


def looks(traces: Iterable[Trace]) -> tuple[list[str], dict[str, str]]:
    """Returns the stages of traces and their roles, in an order that is the same for all runs of a pipeline."""
    stages: dict[str, None] = {}
    roles: dict[str, str] = {}
    for trace in traces:
        ran = set(trace.stages)
        known = [name for name in ([s["name"] for s in trace.declared] or USUAL) if name in ran]
        stages |= dict.fromkeys([*known, *sorted(ran.difference(known))])
        roles |= trace.roles
    return list(stages), roles


def by_task(spans: Iterable[Span]) -> dict[str, Span]:
    """Returns spans by the names of their tasks, and the chunks of streaming tasks (:func:`chunk_spans`) by theirs."""
    spans = list(spans)
    found = {span.task: span for span in spans}
    for span in spans:
        for chunk in chunk_spans(span):
            found.setdefault(chunk.task, chunk)
    return found


def chunk_spans(span: Span) -> list[Span]:
    """Returns a span for each chunk of a streaming task, from the task's begin until the chunk was emitted."""
    times = span.args.get("emitted_s") or ()
    return [replace(span, part=i, parts=len(times), end=at, args={}) for i, at in enumerate(times)]


def union(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merges intervals that overlap or touch.

    >>> union([(3, 4), (0, 1), (1, 2), (0.5, 0.7)])
    [(0, 2), (3, 4)]
    """
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(i for i in intervals if i[1] > i[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def covered(intervals: Iterable[tuple[float, float]], begin: float, end: float) -> float:
    """Returns how much of ``begin..end`` the intervals cover together."""
    return sum(b - a for a, b in union((max(a, begin), min(b, end)) for a, b in intervals))


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spreads spans over the fewest lanes without overlap; each takes the first free lane."""
    rows: list[list[Span]] = []
    taken: list[tuple[float, int]] = []  # (end, lane)
    free: list[int] = []
    for span in sorted(spans, key=lambda s: (s.begin, s.end, s.step, s.stage, s.part)):
        while taken and taken[0][0] <= span.begin:
            heapq.heappush(free, heapq.heappop(taken)[1])
        lane = heapq.heappop(free) if free else len(rows)
        if lane == len(rows):
            rows.append([])
        rows[lane].append(span)
        heapq.heappush(taken, (max(span.begin, span.end), lane))
    return rows


def in_flight(marks: Iterable[Mark]) -> list[tuple[float, int]]:
    """Returns (time, number of open marks from then on) for each change of that number; marks may be millions."""
    import numpy as np

    edges = np.fromiter((t for m in marks if m.end > m.begin for t in (m.begin, m.end)), dtype=np.float64)
    times, places = np.unique(edges, return_inverse=True)
    change = np.zeros(len(times), dtype=np.int64)
    np.add.at(change, places[::2], 1)
    np.add.at(change, places[1::2], -1)
    return list(zip(times[change != 0].tolist(), np.cumsum(change)[change != 0].tolist(), strict=True))
