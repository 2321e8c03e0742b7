"""What the page draws of runs below each other, each thing with its place and its words. Pure.

Vertical places are pixels from the top; horizontal ones are seconds of an axis that leaves out the time in which a run
was not running. Words are a headline, then a line ``name<TAB>value`` for each fact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dataflow.drawing.duration import seconds
from dataflow.drawing.style import cause_colours, colours, contrast
from dataflow.errors import counted
from dataflow.timeline.causes.attribution import Wait
from dataflow.timeline.causes.critical import critical_path
from dataflow.timeline.causes.culprits import Culprit, culprits, last_requests, place_of
from dataflow.timeline.downtime import Axis
from dataflow.timeline.spans import POOLS, Mark, Span, Trace, in_flight, lanes, looks
from dataflow.timeline.text import extent

_HEAD, _STRIP, _GAP = 22, 15, 6  # pixels: a run's name, the numbers of its steps, between two rows
_POOL, _LANE, _LANES, _BAND = 42, 15, 120, 84  # a GPU pool, a lane of another row, all of them, requests in flight
_FEW = 2
"""Runs that are drawn as high as one; more are half as high."""
_POINTS = 2000  # of a band: about the pixels across a screen
_WORD = 80  # characters of one fact, at most
_GREY = {"#4D4D4D": "#8C8C8C"}
"""Colours of stages that are too dark for a dark page, and what replaces them."""


def chart(traces: Mapping[str, Trace], samples: Mapping[str, str]) -> dict[str, Any]:
    """Returns what ``page.js`` draws, JSON-able.

    Args:
        traces: runs by name, each with at least one task.
        samples: run -> address of the page of its samples, if there is one.
    """
    layers = ("runs", "rows", "bands", "ends", "waits", "bars", "requests", "path", "cuts")
    made: dict[str, Any] = {name: [] for name in layers} | {"height": 0.0, "length": 0.0, "stripes": 0}
    for name, trace in traces.items():
        _Run(made, trace, name if len(traces) > 1 else "", samples.get(name, ""), 1.0 if len(traces) <= _FEW else 0.5)
    fill = colours(*looks(traces.values()))
    made["stages"] = {name: [c, _GREY.get(c, c), contrast(c)] for name, c in fill.items()}
    made["causes"] = cause_colours(wait["cause"] for wait in made["waits"])
    made["length"] = made["length"] * 1.005 or 1.0
    return made


class _Run:
    """Adds one run below those that are there."""

    def __init__(self, made: dict[str, Any], trace: Trace, name: str, samples: str, tall: float) -> None:
        self.made, self.trace, self.name, self.samples, self.tall = made, trace, name, samples, tall
        self.time = Axis(trace.downtimes, *extent(trace))
        self.at = self.time.at
        self.head = f"{name}: " if name else ""
        self.place: dict[str, tuple[float, float]] = {}  # task -> (top, bottom) of its bar
        self.rows: dict[str, tuple[float, float]] = {}  # resource -> (top, bottom)
        self.versions = versions(trace)
        pools = trace.pools or trace.resources[:1]
        self.stripe = {pool: made["stripes"] + i for i, pool in enumerate(pools)}
        made["stripes"] += len(pools)
        of: dict[str, list[Mark]] = {}
        for mark in trace.marks:
            of.setdefault(mark.resource, []).append(mark)
        top = made["height"]
        made["height"] += _HEAD + _STRIP
        for resource in trace.resources:
            self._row(resource, of.get(resource, []))
        for endpoint, marks in endpoints_of(trace).items():
            above = made["height"]
            self._band(marks, _BAND * tall / 2)
            self._close(endpoint, above)
        found = culprits(trace, after=True)
        self._waits(found)
        self._requests(of, found)
        self._path()
        span = {"top": top + _HEAD, "bottom": made["height"] - _GAP}
        made["runs"].append({"name": name, "y": top + _HEAD / 2, **span})
        made["ends"] += [{"x": self.at(at), "step": step, **span} for step, at in step_ends(trace).items()]
        for down in self.time.downtimes:
            tip = _tip(self.head + down.words, {"after": seconds(self.at(down.begin)), "why": down.why})
            made["cuts"].append({"x": self.at(down.begin), "words": down.words, "tip": tip, **span})
        made["length"] = max(made["length"], self.time.length)

    def _close(self, name: str, top: float) -> None:
        """Ends a row."""
        self.rows[name] = top, self.made["height"]
        self.made["rows"].append({"name": name, "top": top, "bottom": self.made["height"]})
        self.made["height"] += _GAP

    def _add(self, layer: str, begin: float, end: float, place: tuple[float, float], **facts: Any) -> None:
        """Adds what takes some time; ``begin`` and ``end`` are those of the trace."""
        x = [round(self.at(begin), 6), round(self.at(end), 6)]
        self.made[layer].append({"x": x, "y": [round(y, 1) for y in place], **facts})

    def _row(self, resource: str, marks: Sequence[Mark]) -> None:
        top, rows = self.made["height"], lanes(self.trace.on(resource))
        lane = _POOL if resource in POOLS and len(rows) == 1 else _LANE
        high = min(lane * self.tall, _LANES * self.tall / max(1, len(rows)))
        for i, spans in enumerate(rows):
            for span in spans:
                self.place[span.task] = top + i * high, top + (i + 1) * high - (1 if high > 4 else 0)
                self._bar(span)
        self.made["height"] += high * len(rows)
        self._band(marks, _BAND * self.tall)
        self._close(resource, top)

    def _bar(self, span: Span) -> None:
        rest = {name: value for name, value in span.args.items() if name not in ("weights_version", "staleness")}
        if times := rest.pop("emitted_s", ()):
            rest["emitted"] = f"in {counted(len(times), 'chunk')}, from {seconds(self.at(times[0]))} on"
        if rest.pop("optional", False):
            rest["training"] = "does not wait for it"
        version, stale = self.versions[span.task]
        own = {"weights version": version, "staleness": stale, "waited for": span.waited_for}
        tip = _tip(self.head + span.task, self._spent(span.begin, span.end) | own | rest)
        self._add("bars", span.begin, span.end, self.place[span.task], stage=span.stage, step=span.step,
                  label=span.label, task=self.head + span.task, tip=tip,
                  stripe=self.stripe.get(span.resource, -1))  # fmt: skip

    def _spent(self, begin: float, end: float) -> dict[str, Any]:
        return {"took": seconds(end - begin), "began": f"{self.at(begin):.2f} s", "ended": f"{self.at(end):.2f} s"}

    def _band(self, marks: Sequence[Mark], high: float) -> None:
        """Adds the number of requests in flight over time."""
        if levels := in_flight(marks):
            top = self.made["height"] + 2
            points = [[round(self.at(time), 6), level] for time, level in thin(levels, _POINTS)]
            most = max(level for _, level in levels)
            self.made["bands"].append({"y": [top, top + high], "points": points, "most": most, "head": self.head})
            self.made["height"] = top + high

    def _waits(self, found: Sequence[Culprit]) -> None:
        for culprit in found:
            wait = culprit.wait
            facts = {"came last": culprit.words, "then ran": wait.task}
            tip = _tip(f"{self.head}{culprit.pool} waits for {wait.cause}", self._spent(wait.begin, wait.end) | facts)
            if culprit.pool in self.rows:
                self._add("waits", wait.begin, wait.end, self.rows[culprit.pool], cause=wait.cause,
                          step=step_of(wait.task), task=self.head + wait.task, tip=tip,
                          words=f"{wait.cause} {seconds(wait.seconds)}")  # fmt: skip

    def _requests(self, of: Mapping[str, Sequence[Mark]], found: Sequence[Culprit]) -> None:
        """Adds the last request of each part, whether or not GPUs waited for it, with the task that it led to."""
        waited: dict[int, str] = {}
        idle: dict[int, float] = {}
        for culprit in found:
            if culprit.request is not None:
                waited.setdefault(id(culprit.request), culprit.wait.task)
                idle[id(culprit.request)] = idle.get(id(culprit.request), 0.0) + culprit.wait.seconds
        known, update_for = {span.task: span for span in self.trace.spans}, _updates(self.trace, of)
        for agent, marks in of.items():
            last = last_requests(marks)
            spans = [Span("", i, 0, 1, agent, m.begin, max(m.begin, m.end)) for i, m in enumerate(last.values())]
            tracks = lanes(spans)
            lane_of = {span.step: i for i, lane in enumerate(tracks) for span in lane}
            high = _BAND * self.tall / max(1, len(tracks))
            for i, ((step, part), mark) in enumerate(last.items()):
                y = self.rows[agent][1] - high * (lane_of[i] + 0.5)
                target = known.get(waited.get(id(mark), "")) or update_for(step, part)
                wait_s, place = idle.get(id(mark), 0.0), place_of(mark)
                address = f"{self.samples}#step-{place[0]}-group-{place[1]}" if self.samples and place else ""
                facts = {
                    "led to": target.task if target else "",
                    "GPUs waited": seconds(wait_s) if wait_s else "not at all",
                    "click": "opens its text" if address else "",
                }
                who = Culprit(Wait(mark.begin, mark.end, "rewards", ""), "", step, mark).words
                tip = _tip(f"{self.head}slowest request: {who}", self._spent(mark.begin, mark.end) | facts)
                more: dict[str, Any] = {"task": self.head + target.task} if target else {}
                if target and target.task in self.place:
                    above, below = self.place[target.task]
                    more["to"] = [round(self.at(max(target.begin, mark.end)), 6), (above + below) / 2]
                self._add(
                    "requests", mark.begin, mark.end, (y, y), step=step, idle=wait_s, address=address, tip=tip, **more
                )

    def _path(self) -> None:
        for span in critical_path(self.trace):
            # A chunk of a streaming task has no bar of its own; the path runs over the task's bar.
            whole = Span(span.stage, span.step, 0, 1, span.resource, 0, 0).task
            place = self.place.get(span.task) or self.place.get(whole) or self.rows[span.resource]
            self._add("path", span.begin, span.end, place, step=span.step, stage=span.stage,
                      task=self.head + span.task)  # fmt: skip


def _tip(head: str, facts: Mapping[str, Any]) -> str:
    lines = [head]
    for name, value in facts.items():
        if value is not None and value != "":
            text = " ".join((f"{value:.6g}" if isinstance(value, float) else str(value)).split())
            lines.append(f"{' '.join(name.split())[:_WORD]}\t{text if len(text) <= _WORD else text[: _WORD - 1] + '…'}")
    return "\n".join(lines)


def thin(levels: Sequence[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """Returns about ``most`` of the (seconds, level) at most, each with the highest level until the next.

    >>> thin([(0, 1), (1, 5), (2, 3), (3, 4), (9, 0)], 2)
    [(0, 5), (3, 4), (9, 0)]
    """
    size = -(-len(levels) // most)
    shares = [levels[i : i + size] for i in range(0, len(levels) - 1, size)]
    return [*((share[0][0], max(level for _, level in share)) for share in shares), levels[-1]]


def step_of(task: str) -> int:
    """Returns the step in a task's name; -1 if there is none.

    >>> step_of("actor_update[12.3]"), step_of("")
    (12, -1)
    """
    number = task.rpartition("[")[2].partition("]")[0].partition(".")[0]
    return int(number) if number.isdecimal() else -1


def endpoints_of(trace: Trace) -> dict[str, list[Mark]]:
    """Returns address -> its requests, in order; none where the reward object names no endpoint."""
    marks: dict[str, list[Mark]] = {}
    for mark in trace.marks:
        if url := mark.args.get("endpoint"):
            marks.setdefault(url.partition("://")[2] or url, []).append(mark)
    return marks


def step_ends(trace: Trace) -> dict[int, float]:
    """Returns step -> end of its training: of its last update or, without stages that train, of its last task."""
    trains, syncs = trace.with_role("trains"), trace.with_role("syncs")
    ends: dict[int, float] = {}
    for span in trace.spans:
        if not span.optional and (span.stage in trains if trains else span.stage not in syncs):
            ends[span.step] = max(span.end, ends.get(span.step, span.end))
    return {step: ends[step] for step in trace.whole_steps if step in ends}


def _updates(trace: Trace, agents: Mapping[str, Any]) -> Callable[[int, int], Span | None]:
    """Returns a function that finds the first update that trains on the rewards of a (step, part)."""
    trains = trace.with_role("trains")
    updates: dict[int, list[Span]] = {}
    shares: dict[int, int] = {}
    for span in trace.spans:
        if span.stage in trains:
            updates.setdefault(span.step, []).append(span)
        elif span.resource in agents:
            shares[span.step] = max(shares.get(span.step, 1), span.parts)

    def find(step: int, part: int) -> Span | None:
        share = shares.get(step, 1)
        on = [span for span in updates.get(step, ()) if span.part == max(part, 0) * span.parts // share]
        return min(on, key=lambda span: (span.begin, span.stage), default=None)

    return find


def versions(trace: Trace) -> dict[str, tuple[int | None, int | None]]:
    """Returns task -> (version, staleness), None where it is not known.

    The version is that of the weights that generated its samples; the staleness is how many steps these are older than
    the weights that its step's update starts from.
    """
    trains, syncs = trace.with_role("trains"), trace.with_role("syncs")
    of_step: dict[int, int] = {}
    for span in trace.spans:
        if not span.optional and span.stage not in syncs and (made := span.args.get("weights_version")) is not None:
            of_step[span.step] = min(made, of_step.get(span.step, made))
    found: dict[str, tuple[int | None, int | None]] = {}
    for span in trace.spans:
        version, stale = span.args.get("weights_version"), span.args.get("staleness")
        if version is None and span.stage in trains:
            version = of_step.get(span.step)
        if span.optional or span.stage in syncs:
            stale = None
        elif stale is None and version is not None:
            stale = span.step - 1 - version
        found[span.task] = version, None if stale is None else round(stale)
    return found
