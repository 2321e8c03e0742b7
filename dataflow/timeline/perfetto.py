"""The trace as a file: Trace Event JSON, which https://ui.perfetto.dev opens as it is, and the way back.

A process per run, a track per resource (further ones where its tasks overlap), one for the GPU's waits, async
spans for reward requests, arrows from samples to their rewards to their updates, counters of requests in flight and of
the limits that changed. Timestamps are whole microseconds, so that neighbours on a track never overlap by rounding; the
exact times stand in ``args``. docs/trace.md has the format; :mod:`dataflow.timeline.writer` writes it.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataflow.errors import DataError, nearest
from dataflow.files import decoded, replaced
from dataflow.timeline.spans import USUAL, VERSION, Level, Mark, Span, Trace
from dataflow.timeline.writer import FORMAT, LEVEL, MARK, PID, REQUEST, SPAN, TASK, TraceWriter

_SHARE = 1000  # items that are written at once


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a whole trace; a reader sees the old file or the new one, never half of it.

    Args:
        trace: what to write. NaN and infinities in ``args`` become null, numpy scalars become numbers.
        path: of the JSON file; its directory must exist.

    Raises:
        ValueError: the time of something is NaN or infinite.
        RunError: the file cannot be written.
    """
    items: list[Span | Mark | Level] = [*trace.spans, *trace.marks, *trace.levels]
    with replaced(path) as temporary, TraceWriter(temporary, trace.meta) as writer:
        for i in range(0, len(items), _SHARE):
            writer.add(*items[i : i + _SHARE])
        if writer.left_out:
            raise ValueError(f"trace {path}: {writer.left_out} of {len(items)} items cannot be written: NaN in a time?")
        writer.close(trace)


def load(run: str) -> Trace:
    """Reads the trace of a run, given by its directory or by the file.

    Raises:
        DataError: there is no such run, or as :func:`read`.
    """
    path = Path(run)
    if path.is_dir():
        path = path / "trace.json"
    if not path.is_file():
        near = nearest(run, [str(p) for p in path.parent.parent.glob("*")]) if path.parent.parent.is_dir() else ""
        raise DataError(f"no run at '{run}': there is no {path}{near or '; give a run directory (runs/NAME)'}")
    return read(path)


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace's file, equal to the bit; of one that was cut off, what there is.

    Args:
        path: of a file that :func:`write` wrote, or a run while it went; also packed, as ``.gz``. If it has no end,
            ``meta["cut"]`` says in a sentence what is missing, and ``meta["status"]`` is "cut off".

    Raises:
        DataError: no such file, no JSON, no trace of ours, or one of a newer version.
    """
    try:
        data = Path(path).read_bytes()
        text = decoded(gzip.decompress(data) if Path(path).suffix == ".gz" else data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"trace {path} is no whole gzip file ({error}); pack it anew.") from error
    except OSError as error:
        raise DataError(f"trace {path}: {error.strerror or error}; give the trace.json of a run.") from error
    except ValueError as error:
        raise DataError(f"trace {path} is not text ({error}); give the trace.json of a run.") from error
    if not text.strip():
        raise DataError(f"trace {path} is empty; give the trace.json of another run.")
    events, said = _parse(text, path)
    version, meta = said.get("version"), said.get("meta")
    if not isinstance(version, int) or version > VERSION:
        raise DataError(f"trace {path} is of version {version}, this dataflow reads {VERSION}; install a newer one.")
    if not isinstance(meta, dict):
        raise DataError(f"trace {path} does not say of what run it is; give the trace.json of another run.")
    trace = Trace(meta=meta)
    for stage in trace.declared:
        # A trace of before says which stage formed parts, and no other role.
        if stage.get("grain") == "emission":
            stage["grain"] = "chunk"
        usual = "collects" if stage.pop("forms_parts", False) else USUAL.get(stage.get("name", ""), ("", ""))[0]
        stage.setdefault("role", usual or None)
    for event in events:
        try:
            _take(trace, event)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"trace {path} has a broken event ({type(error).__name__}: {error}) in "
                f"{json.dumps(event)[:80]}; give the trace.json of another run."
            ) from error
    if said.get("open"):
        meta["cut"] = _cut(trace)
        if meta.get("status") == "running":
            meta["status"] = "cut off"
    return trace


def _parse(text: str, path: str | os.PathLike[str]) -> tuple[list[Any], dict[str, Any]]:
    """Returns a file's events and what it says of itself, last: its version, its meta, whether it is still open."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        if not text.lstrip().startswith("["):
            raise DataError(f"trace {path} is not JSON ({error}); give the trace.json of a run.") from error
        data = _lines(text, path)
    other: Any = None
    if isinstance(data, dict):
        # Version 1, or a tool that saved the trace in the other form.
        other, data = data.get("otherData"), data.get("traceEvents")
    events = data if isinstance(data, list) else []
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "M" and isinstance(args := event.get("args"), dict):
            other = args if args.get("format") == FORMAT else other
    if not isinstance(data, list) or not isinstance(other, dict) or other.get("format") != FORMAT:
        raise DataError(f"trace {path} was not written by dataflow; give the trace.json of a run.")
    return events, other


def _lines(text: str, path: str | os.PathLike[str]) -> list[Any]:
    """Returns the events of a file that has no end: one a line, the last of which may be half written."""
    lines = text.strip().split("\n")
    events = []
    for number, line in enumerate(lines, start=1):
        bare = (line.lstrip().removeprefix("[") if number == 1 else line).strip().removesuffix(",")
        if not bare:
            continue
        try:
            events.append(json.loads(bare))
        except (json.JSONDecodeError, RecursionError) as error:
            if number < len(lines):
                raise DataError(
                    f"trace {path} has a broken event in line {number} ({error}): {bare[:80]!r}; "
                    "give the trace.json of another run."
                ) from error
    if not events:
        raise DataError(f"trace {path} is cut off before its first event; give the trace.json of another run.")
    return events


def _take(trace: Trace, event: Any) -> None:
    kind = (event["ph"], event.get("cat"))
    if event.get("pid", PID) != PID:
        return  # of a profile that was merged with it
    if kind == ("X", TASK):
        own, args = _unpack(SPAN, event["args"])
        trace.add(Span(**own, args=args))
    elif kind == ("b", REQUEST):
        own, args = _unpack(MARK, event["args"])
        trace.add(Mark(str(event["name"]), **own, args=args))
    elif kind == ("C", LEVEL):
        trace.add(Level(str(event["name"]), _seconds(event["at_s"]), float(event["args"]["value"])))


def _cut(trace: Trace) -> str:
    if not trace.spans:
        return "cut off before its first task had ended: the run was killed, or still goes on"
    end = max(s.end for s in trace.spans)
    last = max(trace.spans, key=lambda s: s.end).task
    return f"cut off after {end:.1f} s: the run was killed, or still goes on; its last task was {last}"


def _unpack(keys: Mapping[str, str], args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: _KINDS[name](args[key]) for key, name in keys.items()}
    return own, {k.removeprefix("+"): v for k, v in args.items() if k not in keys}


def _seconds(value: Any) -> float:
    if not math.isfinite(seconds := float(value)):
        raise ValueError(f"time {value}")
    return seconds


_KINDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("stage", "resource", "waited_for"), str),
    **dict.fromkeys(("step", "part", "parts"), int),
    **dict.fromkeys(("begin", "end"), _seconds),
}
