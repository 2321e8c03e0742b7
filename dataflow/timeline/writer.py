"""Writes the trace's file during the run: Trace Event JSON, one event per line, flushed after each task.

It uses the array form of the format, whose end may be missing, so Perfetto and Chrome open the file of a killed process
as well. What depends on the whole trace (gaps, waits, requests in flight) is written when the file is
closed; :func:`dataflow.timeline.perfetto.read` skips it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dataflow.errors import RunError
from dataflow.files import cannot_write
from dataflow.timeline.agents import cause_of
from dataflow.timeline.causes import exposed_waits, waits_after
from dataflow.timeline.spans import Level, Mark, Span, Trace, in_flight

FORMAT = "dataflow"
_SHARE = 1000  # lines per write
_ROOM = 1000  # track numbers reserved for each resource


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
        self._place = {name: i for i, name in enumerate(meta.get("resources") or {}, start=1)}
        self._lanes: dict[str, dict[int, int]] = {}  # resource -> {track: microsecond until which it is occupied}
        self._tracks = self._requests = 0
        self._lines: list[str] = []
        self._broken = False
        try:
            self._file = self.path.open("wb", buffering=0)
        except OSError as error:
            raise self._failed(error) from error
        name = " ".join(str(meta[k]) for k in ("name", "policy") if meta.get(k)) or "run"
        self._put(_described(meta, open=True), _about("process_name", 0, name=name))
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
            if isinstance(item, Span):
                self._span(item)
            elif isinstance(item, Mark):
                self._mark(item)
            else:
                # The exact time is kept outside the args, since Perfetto draws all of these.
                self._put(_event("C", "level", item.name, _ticks(item.at), at_s=item.at, args={"value": item.value}))
        self._flush()

    def describe(self, meta: Mapping[str, Any]) -> None:
        """Writes the trace's meta as known by now; the last one in the file counts.

        Raises:
            RunError: see :meth:`add`.
        """
        self._put(_described(meta, open=True))
        self._flush()

    def close(self, trace: Trace) -> None:
        """Ends the file with the final meta and what depends on the whole trace. A second call does nothing.

        Raises:
            RunError: see :meth:`add`.
        """
        if self._file.closed:
            return
        with self:
            self._put(_described(trace.meta))  # first, as it marks the trace as complete
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

    # Spans and requests are many: formatting what is around their facts by hand saves half of the time.

    def _span(self, span: Span) -> None:
        args = {
            **span.args, "stage": span.stage, "step": span.step, "part": span.part, "parts": span.parts,
            "resource": span.resource, "waited_for": span.waited_for, "begin_s": span.begin, "end_s": span.end,
        }  # fmt: skip
        ts = _ticks(span.begin)
        until = max(ts, _ticks(span.end))
        tid = self._lane(span.resource, ts, until)
        about = f'"cat":"task","name":{encode(f"{span.stage} {span.label}")},"pid":1,"tid":{tid}'
        self._lines.append(f'{{"ph":"X",{about},"ts":{ts},"dur":{until - ts},"args":{encode(args)}}}')

    def _mark(self, mark: Mark) -> None:
        args = {**mark.args, "resource": mark.resource, "begin_s": mark.begin, "end_s": mark.end}
        self._requests += 1
        tid, ts = next(iter(self._lanes_of(mark.resource))), _ticks(mark.begin)
        about = f'"cat":"request","name":{encode(mark.name)},"id":"{self._requests:#x}","pid":1,"tid":{tid}'
        self._lines.append(f'{{"ph":"b",{about},"ts":{ts},"args":{encode(args)}}}')
        self._lines.append(f'{{"ph":"e",{about},"ts":{max(ts, _ticks(mark.end))}}}')

    def _derived(self, trace: Trace) -> Iterator[dict[str, Any]]:
        for gap in trace.gaps:
            yield _event("i", "gap", gap.words, _ticks(gap.at), s="g")  # a line across all tracks
        for pool in trace.pools:
            if waits := [*exposed_waits(trace, pool), *waits_after(trace, pool)]:
                # Right below the pool's own track.
                tid = self._open(f"{pool} waits", _ROOM * self._place[pool] + 1)
                for wait in waits:
                    args = {"cause": wait.cause, "task": wait.task, "waited_for": wait.by}
                    name = f"waits for {wait.cause}"
                    yield _event("X", "wait", name, *_slice(wait.begin, wait.end), tid=tid, args=args)
        for agent in dict.fromkeys(mark.resource for mark in trace.marks):
            for time, level in in_flight(mark for mark in trace.marks if mark.resource == agent):
                yield _event("C", "", f"{cause_of(agent)} in flight", _ticks(time), args={"requests": level})

    # --- tracks ---------------------------------------------------------------------------------------------

    def _lane(self, resource: str, begin: int, end: int) -> int:
        """Returns the track for a span: the free one whose last span ended last.

        As spans come in the order of their ends, this opens the fewest tracks on which they do not overlap.
        """
        lanes = self._lanes_of(resource)
        free = [tid for tid, until in lanes.items() if until <= begin]
        if free:
            tid = max(free, key=lambda tid: lanes[tid])
        else:
            number = len(lanes) + 1
            tid = self._open(f"{resource} {number}", _ROOM * self._place[resource] + min(2 * number, _ROOM - 1))
        lanes[tid] = end
        return tid

    def _lanes_of(self, resource: str) -> dict[int, int]:
        if resource not in self._lanes:
            place = self._place.setdefault(resource, len(self._place) + 1)
            self._lanes[resource] = {self._open(resource, _ROOM * place): 0}
        return self._lanes[resource]

    def _open(self, name: str, place: int) -> int:
        self._tracks += 1
        self._put(_about("thread_name", self._tracks, name=name))
        self._put(_about("thread_sort_index", self._tracks, sort_index=place))
        return self._tracks

    # --- the file -------------------------------------------------------------------------------------------

    def _put(self, *events: Mapping[str, Any]) -> None:
        self._lines += map(encode, events)

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


def _ticks(seconds: float) -> int:
    """Returns microseconds; viewers cannot show negative times, as another machine's clock may give."""
    return max(0, round(seconds * 1e6))


def _slice(begin: float, end: float) -> tuple[int, int]:
    return _ticks(begin), _ticks(end) - _ticks(begin)


def _event(ph: str, cat: str, name: str, ts: int, dur: int | None = None, **more: Any) -> dict[str, Any]:
    about = {"cat": cat} if cat else {}
    lasts = {} if dur is None else {"dur": dur}
    return {"ph": ph, **about, "name": name, "pid": 1, "ts": ts, **lasts, **more}


def _about(kind: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": tid, "args": args}


def _described(meta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    # Every viewer knows this kind of event, and shows only its labels.
    return _about("process_labels", 0, labels=str(meta.get("status", "")), format=FORMAT, **more, meta=meta)


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
