"""A trace as a file of Trace Event JSON, which https://ui.perfetto.dev opens: written during the run, and read.

The file has an event per line, flushed after each task, in the array form of the format, whose end may be missing: so
Perfetto and :func:`read` open the file of a killed process as well. There is a track per resource (more if its tasks
overlap), one for the GPU's waits, async spans for reward requests, and counters of requests in flight and of limits.
Timestamps are whole microseconds, so that neighbours on a track never overlap by rounding; the exact times are in
``args``. What depends on the whole trace (gaps, waits, requests in flight) is written when the file is closed, and
skipped when it is read. docs/trace.md describes the format.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dataflow.errors import DataError, RunError
from dataflow.files import cannot_write, decoded, no_file, replaced
from dataflow.timeline.agents import cause_of
from dataflow.timeline.causes import exposed_waits
from dataflow.timeline.spans import Level, Mark, Span, Trace, in_flight

_FORMAT = "dataflow"
_SHARE = 1000  # items per write
_ROOM = 1000  # track numbers reserved for each resource
_SPAN = ("stage", "step", "part", "parts", "resource", "waited_for")


class TraceWriter:
    """Writes one trace while its items are added, over an existing file; the directory must exist."""

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

        If writing fails (the disk is full), it raises RunError once, and nothing more is written afterwards.
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
        """Writes the trace's meta as known by now; the last one in the file counts."""
        self._put(_described(meta, open=True))
        self._flush()

    def close(self, trace: Trace) -> None:
        """Ends the file with the final meta and what depends on the whole trace. A second call does nothing."""
        if self._file.closed:
            return
        with self:
            self._put(_described(trace.meta))  # first, as it marks the trace as complete
            for gap in trace.gaps:
                self._put(_event("i", "gap", gap.words, _ticks(gap.at), s="g"))  # a line across all tracks
            for pool in trace.pools:
                # Right below the pool's own track.
                tid = self._open(f"{pool} waits", _ROOM * self._place[pool] + 1)
                for wait in exposed_waits(trace, pool):
                    what = {"cause": wait.cause, "task": wait.task, "waited_for": wait.by}
                    ts, until = _ticks(wait.begin), _ticks(wait.end)
                    name = f"waits for {wait.cause}"
                    self._put(_event("X", "wait", name, ts, dur=until - ts, tid=tid, args=what))
            for agent in dict.fromkeys(mark.resource for mark in trace.marks):
                name = f"{cause_of(agent)} in flight"
                for time, level in in_flight(mark for mark in trace.marks if mark.resource == agent):
                    self._put(_event("C", "flight", name, _ticks(time), args={"requests": level}))
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
        with contextlib.suppress(OSError):  # a full disk says so again; the first error of a file is told, no other
            self._file.close()

    # Spans and requests are many: formatting what is around their facts by hand saves half of the time.

    def _span(self, span: Span) -> None:
        args = {
            **span.args, "stage": span.stage, "step": span.step, "part": span.part, "parts": span.parts,
            "resource": span.resource, "waited_for": span.waited_for, "begin_s": span.begin, "end_s": span.end,
        }  # fmt: skip
        ts = _ticks(span.begin)
        until = max(ts, _ticks(span.end))
        # The free track whose last span ended last: as spans come in the order of their ends, this opens the fewest.
        lanes = self._lanes_of(span.resource)
        tid = max((tid for tid, end in lanes.items() if end <= ts), key=lanes.__getitem__, default=0)
        if not tid:
            number = len(lanes) + 1
            place = _ROOM * self._place[span.resource] + min(2 * number, _ROOM - 1)
            tid = self._open(f"{span.resource} {number}", place)
        lanes[tid] = until
        about = f'"cat":"task","name":{encode(f"{span.stage} {span.label}")},"pid":1,"tid":{tid}'
        self._lines.append(f'{{"ph":"X",{about},"ts":{ts},"dur":{until - ts},"args":{encode(args)}}}')

    def _mark(self, mark: Mark) -> None:
        args = {**mark.args, "resource": mark.resource, "begin_s": mark.begin, "end_s": mark.end}
        self._requests += 1
        tid, ts = next(iter(self._lanes_of(mark.resource))), _ticks(mark.begin)
        about = f'"cat":"request","name":{encode(mark.name)},"id":"{self._requests:#x}","pid":1,"tid":{tid}'
        self._lines.append(f'{{"ph":"b",{about},"ts":{ts},"args":{encode(args)}}}')
        self._lines.append(f'{{"ph":"e",{about},"ts":{max(ts, _ticks(mark.end))}}}')

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


def _event(ph: str, cat: str, name: str, ts: int, **more: Any) -> dict[str, Any]:
    return {"ph": ph, "cat": cat, "name": name, "pid": 1, "ts": ts, **more}


def _about(kind: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": 1, "tid": tid, "args": args}


def _described(meta: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    # Every viewer knows this kind of event, and shows only its labels.
    return _about("process_labels", 0, labels=str(meta.get("status", "")), format=_FORMAT, **more, meta=meta)


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


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a whole trace; the file is replaced atomically.

    NaN and infinities in ``args`` become null, numpy scalars become numbers.
    """
    items: list[Span | Mark | Level] = [*trace.spans, *trace.marks, *trace.levels]
    with replaced(path) as temporary, TraceWriter(temporary, trace.meta) as writer:
        for i in range(0, len(items), _SHARE):
            writer.add(*items[i : i + _SHARE])
        writer.close(trace)


# --- reading ----------------------------------------------------------------------------------------------------------


def load(run: str) -> Trace:
    """Reads the trace of a run, given its directory or its file."""
    path = Path(run)
    if path.is_dir():
        path = path / "trace.json"
    if (why := no_file(path)) is not None:
        where = "" if path == Path(run) else f"{path}: "
        raise DataError(f"no run at '{run}': {where}{why}; give a run directory (runs/NAME).")
    return read(path)


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace from its file; equal, bit for bit, to the one written. Also reads files that were cut off.

    The file may be compressed, as ``.gz``. If its end is missing, ``meta["status"]`` is "cut off", and ``meta["cut"]``
    is a sentence that describes what is missing. A file that is no trace of dataflow is a DataError.
    """
    try:
        data = Path(path).read_bytes()
        text = decoded(gzip.decompress(data) if Path(path).suffix == ".gz" else data)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"trace {path} cannot be read ({error}); give the trace.json of a run.") from error
    trace, header = Trace(), dict[str, Any]()
    try:
        for event in _events(text):
            if event["ph"] == "M":
                header = event["args"] if event["args"].get("format") == _FORMAT else header
            elif (item := _item(event)) is not None:
                trace.add(item)
        trace.meta = header["meta"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"was not written by dataflow ({error!r})"
        raise DataError(f"trace {path} {why}; give the trace.json of a run.") from error
    if header.get("open"):
        last = max(trace.spans, key=lambda s: s.end, default=None)
        after = "before its first task had ended" if last is None else f"after {last.end:.1f} s"
        which = "" if last is None else f"; its last task was {last.task}"
        trace.meta["cut"] = f"cut off {after}: the run was killed, or is still running{which}"
        if trace.meta.get("status") == "running":
            trace.meta["status"] = "cut off"
    return trace


def _events(text: str) -> Iterator[Any]:
    """Yields the events of a file, one per line; the last line of a file without its end may be incomplete."""
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        bare = line.strip().removesuffix(",")
        if bare in ("", "[", "]"):
            continue
        try:
            yield json.loads(bare)
        except json.JSONDecodeError:
            if number < len(lines):
                raise


def _item(event: dict[str, Any]) -> Span | Mark | Level | None:
    """Returns what an event records; None for one that is derived from others."""
    kind, args = (event["ph"], event.get("cat")), event.get("args", {})
    if kind == ("X", "task"):
        own = {name: args.pop(name) for name in _SPAN}
        return Span(**own, begin=args.pop("begin_s"), end=args.pop("end_s"), args=args)
    if kind == ("b", "request"):
        return Mark(event["name"], args.pop("resource"), args.pop("begin_s"), args.pop("end_s"), args)
    return Level(event["name"], event["at_s"], args["value"]) if kind == ("C", "level") else None
