"""Writes the trace's file during the run: Trace Event JSON, one event per line, flushed after each task.

It uses the array form of the format, whose end may be missing, so Perfetto and Chrome open the file of a killed process
as well. What depends on the whole trace (downtimes, waits, flows, requests in flight) is written when the file is
closed; :func:`dataflow.timeline.perfetto.read` skips it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from dataflow.errors import RunError
from dataflow.files import cannot_write
from dataflow.timeline.agents import cause_of
from dataflow.timeline.causes.attribution import exposed_waits, waits_after
from dataflow.timeline.servers import servers_of
from dataflow.timeline.spans import Level, Mark, Span, Trace, changes, flows

FORMAT = "dataflow"
PID = 1
TASK, REQUEST, WAIT, LEVEL, FLOW, DOWNTIME = "task", "request", "wait", "level", "flow", "gap"

# Key in an event's args -> attribute of the span or mark.
SPAN = {k: k for k in ("stage", "step", "part", "parts", "resource", "waited_for")}
SPAN |= {"begin_s": "begin", "end_s": "end"}
MARK = {"resource": "resource", "begin_s": "begin", "end_s": "end"}

_SHARE = 1000  # lines per write
_ROOM = 1000  # track numbers reserved for each resource


@dataclass
class _Lane:
    """A track, and the microsecond until which it is occupied."""

    tid: int
    end: int


class TraceWriter:
    """Writes one trace while its items are added.

    Args:
        path: of the file, which is overwritten; its directory must exist.
        meta: of the trace, as far as it is known.

    Raises:
        RunError: the file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self.left_out = 0
        """Number of items that could not be written: a time is not finite, or the facts contain themselves."""
        self._place = {name: i for i, name in enumerate(meta.get("resources") or {}, start=1)}
        self._lanes: dict[str, list[_Lane]] = {}
        self._tracks = 0
        self._requests = 0
        self._slices: dict[tuple[str, int, int], tuple[int, int, int]] = {}  # task -> (track, begin, end)
        self._lines: list[str] = []
        self._broken = False
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        name = " ".join(str(meta[k]) for k in ("name", "policy") if meta.get(k)) or "run"
        self._put(self._said(meta, open=True), _about("process_name", 0, name=name))
        try:
            self._flush(b"[\n")
        except RunError:
            self._file.close()
            raise

    def add(self, *items: Span | Mark | Level) -> None:
        """Writes spans, marks and levels at once, so that they outlive a kill of this process.

        Raises:
            RunError: writing failed (the disk is full); raised once, and nothing more is written afterwards.
        """
        for item in items:
            # Facts that cannot be written must not end the run; such items are counted.
            try:
                if isinstance(item, Span):
                    self._span(item)
                elif isinstance(item, Mark):
                    self._mark(item)
                else:
                    self._level(item)
            except Exception:
                self.left_out += 1
        self._flush()

    def describe(self, meta: Mapping[str, Any]) -> None:
        """Writes the trace's meta as known by now; the last one in the file counts.

        Raises:
            RunError: see :meth:`add`.
        """
        self._put(self._said(meta, open=True))
        self._flush()

    def close(self, trace: Trace) -> None:
        """Ends the file with the final meta and what depends on the whole trace. A second call does nothing.

        Args:
            trace: of everything that was added.

        Raises:
            RunError: see :meth:`add`.
        """
        if self._file.closed:
            return
        with self:
            self._put(self._said(trace.meta))  # first, as it marks the trace as complete
            for event in self._derived(trace):
                self._put(event)
                if len(self._lines) >= _SHARE:
                    self._flush()
            # The last event must not be followed by a comma.
            self._put(_about("process_sort_index", 0, sort_index=0))
            self._flush(end=b"\n]\n")
            if not self._broken:
                try:
                    self._file.close()
                except OSError as error:
                    raise self._failed(error) from error

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.leave()

    def leave(self) -> None:
        """Closes the file without its end, as a kill leaves it. Idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()

    # --- events ---------------------------------------------------------------------------------------------

    def _said(self, meta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        # Every viewer knows this kind of event, and shows only its labels.
        own = {"format": FORMAT, **more, "meta": meta}
        return _about("process_labels", 0, labels=str(meta.get("status", "")), **own)

    # Spans and requests are many: formatting their lines by hand takes half the time.

    def _span(self, span: Span) -> None:
        ts, until = self._ticks(span.begin, span.end)
        args = _pack(
            f'"stage":{_text(span.stage)},"step":{span.step:d},"part":{span.part:d},"parts":{span.parts:d},'
            f'"resource":{_text(span.resource)},"waited_for":{_text(span.waited_for)},'
            f'"begin_s":{float(span.begin)!r},"end_s":{float(span.end)!r}',
            SPAN,
            span.args,
        )
        about = f'"cat":"{TASK}","name":{_text(f"{span.stage} {span.label}")}'
        tid = self._lane(span.resource, ts, until)
        place = f'"pid":{PID},"tid":{tid},"ts":{ts},"dur":{until - ts}'
        self._lines.append(f'{{"ph":"X",{about},{place},"args":{args}}}')
        self._slices[span.stage, span.step, span.part] = (tid, ts, until)

    def _mark(self, mark: Mark) -> None:
        ts, until = self._ticks(mark.begin, mark.end)
        resource, begin, end = _text(mark.resource), float(mark.begin), float(mark.end)
        args = _pack(f'"resource":{resource},"begin_s":{begin!r},"end_s":{end!r}', MARK, mark.args)
        tid = self._lanes_of(mark.resource)[0].tid
        self._requests += 1
        about = f'"cat":"{REQUEST}","name":{_text(str(mark.name))},"id":"{self._requests:#x}","pid":{PID},"tid":{tid}'
        self._lines.append(f'{{"ph":"b",{about},"ts":{ts},"args":{args}}}')
        self._lines.append(f'{{"ph":"e",{about},"ts":{until}}}')

    def _level(self, level: Level) -> None:
        ts, _ = self._ticks(level.at, level.at)
        if not math.isfinite(level.value):
            raise ValueError(f"{level.name} is {level.value}")
        event = {"ph": "C", "cat": LEVEL, "name": level.name, "pid": PID, "ts": ts}
        # The exact time is kept outside the args, since Perfetto draws all of these.
        self._put({**event, "at_s": level.at, "args": {"value": level.value}})

    def _derived(self, trace: Trace) -> Iterator[dict[str, Any]]:
        if self.left_out:
            trace = _finite(trace)
        if trace.downtimes:
            tid = self._open("not running", 0)  # above all resources
            for down in trace.downtimes:
                ts, until = self._ticks(down.begin, down.end)
                event = {
                    "ph": "X",
                    "cat": DOWNTIME,
                    "name": down.words,
                    "pid": PID,
                    "tid": tid,
                    "ts": ts,
                    "dur": until - ts,
                }
                yield {**event, "args": {"resumed": down.step, "why": down.why}}
        for pool in trace.pools:
            if waits := [*exposed_waits(trace, pool), *waits_after(trace, pool)]:
                # Right below the pool's own track.
                tid = self._open(f"{pool} waits", _ROOM * self._place[pool] + 1)
                for wait in waits:
                    ts, until = self._ticks(wait.begin, wait.end)
                    event = {"ph": "X", "cat": WAIT, "name": f"waits for {wait.cause}", "pid": PID, "tid": tid}
                    facts = {"cause": wait.cause, "task": wait.task, "waited_for": wait.by}
                    yield {**event, "ts": ts, "dur": until - ts, "args": facts}
        for number, (source, at, collect, update) in enumerate(flows(trace), start=1):
            found = [self._slices.get((s.stage, s.step, s.part)) for s in (source, collect, update)]
            yield from self._flow(number, at, [place for place in found if place is not None])
        for agent in dict.fromkeys(mark.resource for mark in trace.marks):
            own = (mark for mark in trace.marks if mark.resource == agent)
            yield from self._in_flight(cause_of(agent), own)
        for server in servers_of(trace):
            yield from self._in_flight(server.name, server.marks)

    def _in_flight(self, name: str, marks: Iterable[Mark]) -> Iterator[dict[str, Any]]:
        for time, level in changes(marks):
            ts, _ = self._ticks(time, time)
            yield {"ph": "C", "name": f"{name} in flight", "pid": PID, "ts": ts, "args": {"requests": level}}

    def _flow(self, number: int, at: float, slices: list[tuple[int, int, int]]) -> Iterator[dict[str, Any]]:
        """Yields the events of an arrow through three slices, unless it would go back in time.

        Viewers bind a flow's event to the slice of its track that is open at its time: the last microsecond of a slice
        belongs to it, its end does not, and an empty slice contains nothing.
        """
        if len(slices) < 3 or any(ts == until for _, ts, until in slices):
            return
        first, middle, last = [(tid, ts, until - 1) for tid, ts, until in slices]
        through = min(middle[2], last[2])
        leaves = min(self._ticks(at, at)[0] - 1, first[2], through)
        leaves = max(leaves, first[1])
        if not leaves <= through or through < middle[1]:
            return
        arrives = max(last[1], through)
        for ph, (tid, *_), ts in zip("stf", (first, middle, last), (leaves, through, arrives), strict=True):
            event = {"ph": ph, "cat": FLOW, "name": "samples", "id": number, "pid": PID, "tid": tid, "ts": ts}
            yield event if ph == "s" else {**event, "bp": "e"}

    # --- tracks and times -----------------------------------------------------------------------------------

    def _ticks(self, begin: float, end: float) -> tuple[int, int]:
        # By another machine's clock a task may begin before the run; viewers cannot show negative times.
        ts = round(begin * 1e6)
        until = round(end * 1e6)
        ts = ts if ts > 0 else 0
        return ts, until if until > ts else ts

    def _lane(self, resource: str, begin: int, end: int) -> int:
        """Returns the track for a span: the free one whose last span ended last.

        As spans come in the order of their ends, this opens the fewest tracks on which they do not overlap.
        """
        lanes = self._lanes_of(resource)
        lane = None
        for one in lanes:
            if one.end <= begin and (lane is None or one.end > lane.end):
                lane = one
        if lane is None:
            number = len(lanes) + 1
            tid = self._open(f"{resource} {number}", _ROOM * self._place[resource] + min(2 * number, _ROOM - 1))
            lane = _Lane(tid, 0)
            lanes.append(lane)
        lane.end = end
        return lane.tid

    def _lanes_of(self, resource: str) -> list[_Lane]:
        if resource not in self._lanes:
            place = self._place.setdefault(resource, len(self._place) + 1)
            self._lanes[resource] = [_Lane(self._open(resource, _ROOM * place), 0)]
        return self._lanes[resource]

    def _open(self, name: str, place: int) -> int:
        self._tracks += 1
        self._put(_about("thread_name", self._tracks, name=name))
        self._put(_about("thread_sort_index", self._tracks, sort_index=place))
        return self._tracks

    # --- the file -------------------------------------------------------------------------------------------

    def _put(self, *events: Mapping[str, Any]) -> None:
        self._lines += [encode(event) for event in events]  # adds all or none

    def _flush(self, begin: bytes = b"", end: bytes = b",\n") -> None:
        lines, self._lines = self._lines, []
        if self._broken or not lines:
            return
        try:
            data = begin + ",\n".join(lines).encode("ascii") + end
            while data:  # a nearly full disk may accept only part of it
                data = data[self._file.write(data) :]
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> RunError:
        self._broken = True
        return cannot_write("trace", self.path, error)


def _finite(trace: Trace) -> Trace:
    spans = [s for s in trace.spans if math.isfinite(s.begin) and math.isfinite(s.end)]
    marks = [m for m in trace.marks if math.isfinite(m.begin) and math.isfinite(m.end)]
    return Trace(spans, marks, meta=trace.meta)


def _about(kind: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PID, "tid": tid, "args": args}


def _pack(own: str, keys: Mapping[str, str], theirs: Mapping[Any, Any]) -> str:
    """Encodes our facts and the user's in one object; a user's key that equals one of ours gets a "+" in front."""
    if not theirs:
        return f"{{{own}}}"
    try:
        clear = keys.keys().isdisjoint(theirs) and "+" not in "".join(theirs)
    except TypeError:
        clear = False  # a key is not a string
    if not clear:
        theirs = {f"+{k}" if k in keys or str(k).startswith("+") else k: v for k, v in theirs.items()}
    return f"{{{own},{encode(theirs)[1:]}"


def encode(value: Any) -> str:
    """Returns a value as JSON in one line; values that JSON lacks are converted by :func:`plain`."""
    try:
        return _quick(value)
    except (ValueError, TypeError):
        return _quick(plain(value))


def plain(value: Any) -> Any:
    """Returns a value converted to what JSON has; a single NaN would make Perfetto refuse the whole file."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return plain(value.tolist())
    return str(value)


_quick = json.JSONEncoder(check_circular=False, allow_nan=False, separators=(",", ":"), default=plain).encode
_text = json.encoder.encode_basestring_ascii
