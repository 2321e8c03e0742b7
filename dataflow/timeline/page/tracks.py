"""Lays out runs on the page: rows, lanes, and the columns of numbers to draw from. Pure.

Vertical positions are pixels from the top; horizontal ones are seconds from a run's first task, on one axis
that leaves out the time in which a run was not running.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from dataflow.errors import counted
from dataflow.timeline.causes.attribution import Wait
from dataflow.timeline.causes.culprits import Culprit, culprits, last_requests, place_of
from dataflow.timeline.downtime import Axis
from dataflow.timeline.page.critical import critical_path
from dataflow.timeline.page.heights import ALONE, BESIDE, Heights
from dataflow.timeline.page.versions import Versions
from dataflow.timeline.servers import servers_of
from dataflow.timeline.spans import POOLS, Mark, Span, Trace, in_flight, lanes
from dataflow.timeline.text import extent

Columns: TypeAlias = dict[str, list[Any]]

_FEW = 2
"""Runs that are drawn as high as one."""
_POINTS = 2000  # of a band: about the pixels across a screen
_WORD = 80  # maximum characters of one fact in a tooltip

_SPANS = ("run", "begin", "end", "top", "bottom", "stage", "step", "part", "parts", "version", "stale", "samples",
          "small", "waited", "more")  # fmt: skip
_PATH = ("run", "begin", "end", "top", "bottom", "stage", "step", "task", "from_x", "from_y", "y")
_WAITS = ("run", "begin", "end", "top", "bottom", "step", "cause_index", "pool", "cause", "task", "who")
_BANDS = ("begin", "end", "top", "bottom", "count")
_REQUESTS = ("run", "begin", "end", "y", "step", "group", "to_x", "to_y", "idle", "who", "task")
_DOWNTIMES = ("run", "at", "top", "bottom", "y", "length", "words", "why")
_STEPS = ("run", "at", "top", "bottom", "y", "step")


@dataclass(frozen=True)
class Row:
    """A resource of a run, with the top and bottom of its row in pixels."""

    name: str
    top: float
    bottom: float


def _columns(names: Iterable[str]) -> Columns:
    return {name: [] for name in names}


@dataclass
class Sheet:
    """Everything to draw, as columns of equal length.

    Attributes:
        names: the runs, from top to bottom.
        high: heights of the parts.
        causes: of all waits; the column ``cause_index`` holds indices into it.
        stages: the stages of all runs; ``stage`` columns hold indices into it.
        rows: the rows of all runs.
        heads: position of each run's name, in pixels.
        height: total height, in pixels.
        longest: seconds of the longest run, including validation at its end.
        stripes: rows of the overview, one for each GPU pool of each run.
        spans: tasks. ``version``, ``stale`` and ``samples`` are NaN if unknown, ``small`` is the row of the overview or
            -1, ``more`` holds further facts.
        path: tasks on the critical paths, each with the end of the one before.
        waits: exposed waits of the GPU pools.
        bands: per agent and server with requests, the number in flight from ``begin`` to ``end``.
        most: maximum in flight of each band.
        requests: per mini-batch, the reward request that ended last, the task that needed it, and for how long GPUs
            were ``idle`` because of it.
        steps: the end of each step's training.
        downtimes: where the time in which a run was not running is cut out.
    """

    names: list[str] = field(default_factory=list)
    high: Heights = ALONE
    causes: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    heads: list[float] = field(default_factory=list)
    height: float = 0.0
    longest: float = 0.0
    stripes: int = 0
    spans: Columns = field(default_factory=lambda: _columns(_SPANS))
    path: Columns = field(default_factory=lambda: _columns(_PATH))
    waits: Columns = field(default_factory=lambda: _columns(_WAITS))
    bands: list[Columns] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    requests: Columns = field(default_factory=lambda: _columns(_REQUESTS))
    steps: Columns = field(default_factory=lambda: _columns(_STEPS))
    downtimes: Columns = field(default_factory=lambda: _columns(_DOWNTIMES))


def sheet(traces: Mapping[str, Trace]) -> Sheet:
    """Lays runs out below each other.

    Args:
        traces: runs by name, each with at least one task.
    """
    stages = dict.fromkeys(stage for trace in traces.values() for stage in trace.stages)
    made = Sheet(stages=list(stages), high=ALONE if len(traces) <= _FEW else BESIDE)
    for name, trace in traces.items():
        made.names.append(name)
        _Run(made, trace).lay_out()
        made.height += made.high.gap
    return made


def _add(columns: Columns, *values: Any) -> None:
    for column, value in zip(columns.values(), values, strict=True):
        column.append(value)


class _Run:
    """Lays one run out on a sheet."""

    def __init__(self, made: Sheet, trace: Trace) -> None:
        self.made, self.trace = made, trace
        self.index = len(made.names) - 1
        self.time = Axis(trace.downtimes, *extent(trace))
        self.at = self.time.at
        made.longest = max(made.longest, self.time.length)
        self.stage = {name: i for i, name in enumerate(made.stages)}
        self.culprits = culprits(trace, after=True)
        self.asked: dict[str, list[Mark]] = {}
        for mark in trace.marks:
            self.asked.setdefault(mark.resource, []).append(mark)
        self.rows: dict[str, Row] = {}
        self.place: dict[str, tuple[float, float]] = {}  # task -> (top, bottom) of its bar

    def lay_out(self) -> None:
        made = self.made
        high = made.high
        made.heads.append(made.height + high.head / 2)
        top = made.height = made.height + high.head + high.strip
        versions, tries = Versions(self.trace), {agent: _tries(marks) for agent, marks in self.asked.items()}
        for resource in self.trace.resources:
            self._row(resource, versions, tries)
        self._servers()
        self._waits()
        self._requests()
        self._path()
        for step, at in step_ends(self.trace).items():
            _add(made.steps, self.index, self.at(at), top, made.height, top - high.strip / 2, step)
        for down in self.time.downtimes:
            why = down.why or down.words
            _add(made.downtimes, self.index, self.at(down.begin), top, made.height, top - high.strip - high.head / 2,
                 down.length, down.words, why)  # fmt: skip

    def _row(self, resource: str, versions: Versions, tries: Mapping[str, Mapping[tuple[int, int], str]]) -> None:
        made, top = self.made, self.made.height
        small = -1
        if resource in (self.trace.pools or self.trace.resources[:1]):
            small, made.stripes = made.stripes, made.stripes + 1
        rows = lanes(self.trace.on(resource))
        levels = in_flight(self.asked.get(resource, ()))
        high = made.high
        most = high.pool if resource in POOLS and len(rows) == 1 else high.lane
        lane = min(most, high.most / len(rows)) if rows else 0.0
        for i, spans in enumerate(rows):
            above, below = top + i * lane, top + (i + 1) * lane - (1.0 if lane > 4 else 0.0)
            for span in spans:
                self.place[span.task] = above, below
                self._span(span, above, below, small, versions, tries.get(resource, {}))
        made.height = top + lane * len(rows)
        if levels:
            self._band(levels, made.height + 2, made.height + 2 + high.band)
            made.height += 2 + high.band
        self.rows[resource] = Row(resource, top, made.height)
        made.rows.append(self.rows[resource])
        made.height += high.gap

    def _span(
        self,
        span: Span,
        above: float,
        below: float,
        small: int,
        versions: Versions,
        tries: Mapping[tuple[int, int], str],
    ) -> None:
        rest = dict(span.args)
        rest.pop("weights_version", None)
        version, stale = versions.of(span), versions.staleness(span)
        samples, optional = rest.pop("samples", None), rest.pop("optional", False)
        rest.pop("staleness", None)
        if times := rest.pop("emitted_s", ()):
            rest["emitted"] = f"in {counted(len(times), 'chunk')}, from {self.at(times[0]):.2f} s on"
        if span.resource in self.asked and not optional:
            rest["requests"] = tries.get((span.step, span.part if span.parts > 1 else -1), "none of its own")
        if optional:
            rest["training"] = "does not wait for it"
        _add(self.made.spans, self.index, self.at(span.begin), self.at(span.end), above, below,
             self.stage[span.stage], span.step, span.part, span.parts, _number(version), _number(stale),
             _number(samples), small, span.waited_for, tooltip(rest))  # fmt: skip

    def _band(self, levels: Sequence[tuple[float, int]], above: float, below: float) -> None:
        most = max(level for _, level in levels)
        columns = _columns(_BANDS)
        levels = thin(levels, _POINTS)
        until = [*(time for time, _ in levels[1:]), levels[-1][0]]
        for (time, level), end in zip(levels, until, strict=True):
            high = below - level / most * (below - above)
            _add(columns, self.at(time), self.at(end), high, below, level)
        self.made.bands.append(columns)
        self.made.most.append(most)

    def _servers(self) -> None:
        """Adds a row for each server of rewards: its requests in flight, and hatched when it was out."""
        band, gap = self.made.high.band / 2, self.made.high.gap
        for server in servers_of(self.trace):
            top = self.made.height
            if levels := in_flight(server.marks):
                self._band(levels, top, top + band)
            self.made.height += band
            self.made.rows.append(Row(server.name, top, self.made.height))
            self.made.height += gap

    def _waits(self) -> None:
        for found in sorted(self.culprits, key=lambda c: (c.wait.begin, c.pool)):
            wait, row = found.wait, self.rows.get(found.pool)
            if row is not None:
                _add(self.made.waits, self.index, self.at(wait.begin), self.at(wait.end), row.top,
                     row.bottom, step_of(wait.task), self._why(wait.cause), found.pool, wait.cause, wait.task,
                     found.words)  # fmt: skip

    def _why(self, cause: str) -> int:
        """Returns the index of a cause."""
        if cause not in self.made.causes:
            self.made.causes.append(cause)
        return self.made.causes.index(cause)

    def _requests(self) -> None:
        """Adds the last request of each mini-batch, whether or not a task waited for it."""
        waited: dict[int, str] = {}
        idle: dict[int, float] = {}
        for found in self.culprits:
            if found.request is not None:
                waited.setdefault(id(found.request), found.wait.task)
                idle[id(found.request)] = idle.get(id(found.request), 0.0) + found.wait.seconds
        by_task = {span.task: span for span in self.trace.spans}
        update_for = _updates(self.trace, self.asked)
        for agent, marks in self.asked.items():
            self._requests_of(last_requests(marks), self.rows[agent], waited, idle, by_task, update_for)

    def _requests_of(
        self,
        chosen: Mapping[tuple[int, int], Mark],
        row: Row,
        waited: Mapping[int, str],
        idle: Mapping[int, float],
        by_task: Mapping[str, Span],
        update_for: Callable[[int, int], Span | None],
    ) -> None:
        """Adds the last request of each part to an agent's row."""
        bars = [Span("", i, 0, 1, m.resource, m.begin, max(m.end, m.begin)) for i, m in enumerate(chosen.values())]
        tracks = lanes(bars)
        lane_of = {span.step: i for i, lane in enumerate(tracks) for span in lane}
        for i, ((step, part), mark) in enumerate(chosen.items()):
            band = self.made.high.band
            y = row.bottom - band + (lane_of[i] + 0.5) / len(tracks) * band
            target = by_task.get(waited.get(id(mark), "")) or update_for(step, part)
            x, at = mark.end, y
            if target is not None and target.task in self.place:
                x, at = max(target.begin, mark.end), self.place[target.task][1]
            _, group = place_of(mark) or (step, -1)
            who = Culprit(Wait(mark.begin, mark.end, "rewards", ""), "", step, mark).words
            _add(self.made.requests, self.index, self.at(mark.begin), self.at(mark.end), y, step, group,
                 self.at(x), at, idle.get(id(mark), 0.0), who, target.task if target else "")  # fmt: skip

    def _path(self) -> None:
        before: tuple[float, float] | None = None
        for span in critical_path(self.trace):
            row = self.rows[span.resource]
            # A chunk of a streaming task has no bar of its own; the path runs over the task's bar.
            above, below = self.place.get(span.task) or self.place.get(_whole(span)) or (row.top, row.bottom)
            y, begin, end = (above + below) / 2, self.at(span.begin), self.at(span.end)
            x, came = before or (begin, y)
            _add(self.made.path, self.index, begin, end, above, below, self.stage[span.stage], span.step, span.task,
                 x, came, y)  # fmt: skip
            before = end, y


def _whole(span: Span) -> str:
    return Span(span.stage, span.step, 0, 1, span.resource, 0, 0).task


def _number(value: Any) -> float:
    """Returns the value, or NaN if it is not a finite number."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan


def step_of(task: str) -> int:
    """Returns the step in a task's name; -1 if the text is not a task's name."""
    number = task.rpartition("[")[2].partition("]")[0].partition(".")[0]
    return int(number) if number.isdecimal() else -1


def tooltip(facts: Mapping[str, Any]) -> str:
    """Returns the lines of a tooltip, each a name, a tab and a value."""
    lines = []
    for name, value in facts.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        text = " ".join(text.split())
        text = text if len(text) <= _WORD else text[: _WORD - 1] + "…"
        lines.append(f"{' '.join(str(name).split())[:_WORD]}\t{text}")
    return "\n".join(lines)


def thin(levels: Sequence[tuple[float, int]], points: int) -> Sequence[tuple[float, int]]:
    """Downsamples levels over time to about ``points`` intervals, keeping the maximum of each.

    Args:
        levels: (seconds, level), ascending in time.
        points: number of intervals.
    """
    if len(levels) <= points:
        return levels
    begin, end = levels[0][0], levels[-1][0]
    size = (end - begin) / points
    kept: list[tuple[float, int]] = []
    high = at = level = 0
    for time, now in levels[:-1]:
        place = min(points - 1, int((time - begin) / size))
        if place != at:
            kept.append((begin + at * size, high))
            # The level stays the same through intervals without a change.
            if place > at + 1:
                kept.append((begin + (at + 1) * size, level))
            high = level
        at, level, high = place, now, max(high, now)
    kept.append((begin + at * size, high))
    if at + 1 < points:
        kept.append((begin + (at + 1) * size, level))
    kept.append((end, levels[-1][1]))
    return kept


def step_ends(trace: Trace) -> dict[int, float]:
    """Returns step -> end of its training: the end of the last part of the stage that ends the first step."""
    syncs = trace.with_role("syncs")
    training = [s for s in trace.spans if not s.optional and s.stage not in syncs]
    pooled = [s for s in training if s.resource in POOLS] or training
    if not pooled:
        return {}
    first = min(s.step for s in pooled)
    closing = max((s for s in pooled if s.step == first), key=lambda s: (s.end, s.stage)).stage
    parts: dict[int, list[Span]] = {}
    for span in pooled:
        if span.stage == closing:
            parts.setdefault(span.step, []).append(span)
    return {step: max(s.end for s in of) for step, of in sorted(parts.items()) if len(of) >= of[0].parts}


def _updates(trace: Trace, asked: Collection[str]) -> Callable[[int, int], Span | None]:
    """Returns a function that finds the first update that trains on the rewards of a (step, part)."""
    trains = trace.with_role("trains")
    updates: dict[int, dict[str, dict[int, Span]]] = {}
    shares: dict[int, int] = {}
    for span in trace.spans:
        if span.stage in trains:
            updates.setdefault(span.step, {}).setdefault(span.stage, {})[span.part] = span
        elif span.resource in asked:
            shares[span.step] = max(shares.get(span.step, 1), span.parts)

    def find(step: int, part: int) -> Span | None:
        found: list[Span] = []
        for of in updates.get(step, {}).values():  # an actor's, a critic's
            parts = next(iter(of.values())).parts
            at = max(part, 0) * parts // shares.get(step, 1)
            found += [of[at]] if at in of else []
        return min(found, key=lambda span: (span.begin, span.stage), default=None)

    return find


def _tries(marks: Iterable[Mark]) -> dict[tuple[int, int], str]:
    """Returns (step, part) -> text with the number of requests and of those tried again."""
    counts: dict[tuple[int, int], list[int]] = {}
    for mark in marks:
        step, part = mark.args.get("step"), mark.args.get("part", -1)
        if isinstance(step, int) and isinstance(part, int) and not {"validation", "greedy"} & mark.args.keys():
            tries = mark.args.get("tries", 1)
            counts.setdefault((step, part), []).append(tries if isinstance(tries, int) else 1)
    found = {}
    for key, tries in counts.items():
        again = sum(t > 1 for t in tries)
        found[key] = f"{len(tries)}, {again} tried again (at most {max(tries)} tries)" if again else f"{len(tries)}"
    return found
