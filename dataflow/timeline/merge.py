"""Merges a run's trace with profiles of the same time (torch profiler, Ray timeline) into one file, on one clock.

A trace has the unix time of its second 0; a torch profiler trace has that of its zero (``baseTimeNanoseconds``); the
times of a Ray timeline are unix times.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflow.errors import DataError, RunError
from dataflow.files import cannot_write, replaced, unwritable
from dataflow.timeline.spans import Trace
from dataflow.timeline.writer import TraceWriter

APART_S = 60.0
"""Seconds that a profile may lie before or after the run, as its workers start earlier and end later."""

_UNIX_US = 1e14  # microseconds; smaller times are not unix times
_IDS = 100_000  # first number for the processes and tracks of profiles


def merge(trace: Trace, profiles: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str] | None) -> str:
    """Writes a run's trace and profiles into one file, which can still be read as a trace of the run.

    Args:
        trace: of a run.
        profiles: files that ``torch.profiler`` exported (``export_chrome_trace``) or ``ray timeline`` wrote, ``.gz`` or
            not. Their processes are shown separately, named after the file.
        out: the .json file to write.

    Returns:
        ``out``.

    Raises:
        DataError: the trace lacks its start time; a file is not a profile, is broken or of another time.
        RunError: ``out`` cannot be written.
    """
    check_out(out)
    assert out is not None
    started = trace.meta.get("started")
    if not isinstance(started, float | int):
        raise DataError("merge: this trace lacks its start time, as it is no run's; give the trace.json of a run.")
    numbers = itertools.count(_IDS)
    loaded = [_Profile(Path(path), trace, started, numbers) for path in profiles]
    # No time may be negative: if a profile began before the run, all times are shifted.
    zero = max([0, *(math.ceil(-profile.begin) for profile in loaded)])
    try:
        with replaced(out) as temporary, TraceWriter(temporary, trace.meta, zero) as writer:
            writer.add(*trace.spans, *trace.marks, *trace.levels)
            for profile in loaded:
                writer.raw(profile.moved(zero))
            writer.close(trace)
    except (RunError, OSError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, OSError) else error  # the writer names its own file
        raise cannot_write("trace", out, cause, "make room there, or give another name") from error
    return str(out)


def check_out(out: str | os.PathLike[str] | None) -> None:
    """Checks that a merged trace can be written, before anything is read.

    Raises:
        DataError: the name is missing or does not end in .json, or the file cannot be written.
    """
    if out is None or Path(out).suffix.lower() != ".json":
        raise DataError(f"merge: -o {out or 'is missing'}; give it the name of a .json file, -o merged.json.")
    if (why := unwritable(out)) is not None:
        raise DataError(f"-o {out}: {why}")


@dataclass
class _Profile:
    """One profile, read and checked.

    Attributes:
        path: of the file.
        trace, started: of the run, and the unix time of its second 0.
        numbers: source of ids for processes, tracks and flows, which must differ between files.
        shift: microseconds to add to the file's times to get the run's.
        begin: of its first event, in microseconds of the run's clock.
    """

    path: Path
    trace: Trace
    started: float
    numbers: Iterator[int]
    shift: float = 0.0
    begin: float = 0.0
    events: list[dict[str, Any]] = field(default_factory=list)
    _known: dict[tuple[str, ...], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        data = _load(self.path)
        events = data.get("traceEvents") if isinstance(data, dict) else data
        if not isinstance(events, list) or not all(map(_is_event, events)):
            raise self._wrong("holds no list of trace events")
        self.events = events
        timed = [e for e in events if e["ph"] != "M"]
        if not timed:
            raise self._wrong("holds no event")
        begins = [self._number(e, "ts") for e in timed]
        begin = min(begins)
        end = max(ts + self._number(e, "dur", 0.0) for ts, e in zip(begins, timed, strict=True))
        base = data.get("baseTimeNanoseconds") if isinstance(data, dict) else None
        if base is None and begin < _UNIX_US:
            raise self._wrong("has no absolute time (neither baseTimeNanoseconds nor unix times)")
        if base is not None and (not isinstance(base, int | float) or not math.isfinite(base)):
            raise self._wrong(f"has {base!r} as the time of its zero")
        # Whole nanoseconds, as a float of unix time is exact only to a quarter of a microsecond.
        self.shift = (int(base or 0) - round(self.started * 1e9)) / 1000
        self.begin = begin + self.shift
        before = -(end + self.shift) / 1e6
        behind = self.begin / 1e6 - max((s.end for s in self.trace.spans), default=0.0)
        if max(before, behind) > APART_S:
            distance = (
                f"ends {before:.0f} s before the run began" if before > 0 else f"begins {behind:.0f} s after its end"
            )
            raise DataError(f"profile {self.path} {distance}; give one that was taken during the run.")

    def moved(self, zero: int) -> Iterator[dict[str, Any]]:
        """Yields its events on the run's clock, ``zero`` microseconds later, with ids that no other file has."""
        stem = self.path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".pt.trace")
        named: set[tuple[str, ...]] = set()
        for event in self.events:
            event = dict(event)
            pid, tid = event.get("pid"), event.pop("tid", None)
            event["pid"] = self._mine("pid", pid)
            if tid is not None and not str(event.get("name")).startswith("process_"):
                event["tid"] = self._mine("tid", pid, tid)
            for key in ("id", "bind_id"):
                if key in event:
                    event[key] = self._mine("id", event[key])
            if isinstance(whole := event.get("id2"), dict) and "global" in whole:
                event["id2"] = {**whole, "global": hex(self._mine("id", whole["global"]))}
            if event["ph"] != "M":
                event["ts"] = round(event["ts"] + self.shift + zero, 3)
                if "dur" in event:
                    # Ray subtracts two large floats, so a duration may be slightly negative.
                    event["dur"] = max(0, event["dur"])
                yield event
                continue
            event.pop("ts", None)
            if event.get("name") == "process_name":
                named.add(_key("pid", pid))
                event["args"] = {"name": f"{stem}: {_said(event)}"}
            elif event.get("name") == "thread_name":
                named.add(_key("tid", pid, tid))
            yield event
        for what, number in self._known.items():
            if what[0] == "pid" and what not in named:
                yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": f"{stem}: {what[1]}"}}
            elif what[0] == "tid" and what not in named:
                place = {"pid": self._known["pid", what[1]], "tid": number}
                yield {"ph": "M", "name": "thread_name", **place, "args": {"name": what[2]}}

    def _mine(self, *what: Any) -> int:
        key = _key(*what)
        if key not in self._known:
            self._known[key] = next(self.numbers)
        return self._known[key]

    def _number(self, event: dict[str, Any], key: str, default: float | None = None) -> float:
        value = event.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(f"has a broken event ({key} is {value!r}) in {json.dumps(event)[:80]}")
        return value

    def _wrong(self, why: str) -> DataError:
        return DataError(
            f"profile {self.path} {why}; give a trace of torch.profiler (export_chrome_trace) or of 'ray timeline'."
        )


def _key(*what: Any) -> tuple[str, ...]:
    """Returns the key of a process, a track or a flow; the number 1 and the text "1" have the same key."""
    return tuple(part if isinstance(part, str) else json.dumps(part) for part in what)


def _is_event(event: Any) -> bool:
    return isinstance(event, dict) and isinstance(event.get("ph"), str)


def _said(event: dict[str, Any]) -> Any:
    args = event.get("args")
    return args.get("name") if isinstance(args, dict) else None


def _load(path: Path) -> Any:
    try:
        data = path.read_bytes()
        return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"profile {path} is not a complete gzip file ({error}); export it again.") from error
    except OSError as error:
        raise DataError(f"profile {path}: {error.strerror or error}; give an existing file.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"profile {path} is not JSON ({error}); give a complete one.") from error
