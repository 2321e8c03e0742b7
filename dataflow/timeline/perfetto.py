"""The trace as a file: Trace Event JSON, which https://ui.perfetto.dev opens as it is, and the way back.

A process per run, a track per resource (further ones where its tasks overlap), one for the GPU's waits, async
spans for reward requests, counters of those in flight and of the limits that changed. Timestamps are whole
microseconds, so that neighbours on a track never overlap by rounding; the exact times stand in ``args``.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dataflow.errors import DataError
from dataflow.files import replaced
from dataflow.timeline.attribution import exposed_waits
from dataflow.timeline.spans import VERSION, Level, Mark, Span, Trace, in_flight, lanes

PID = 1
TASK, REQUEST, WAIT, LEVEL = "task", "request", "wait", "level"

# Key in an event's args -> attribute of the span or mark.
_SPAN = {k: k for k in ("stage", "step", "part", "parts", "resource", "waited_for")}
_SPAN |= {"begin_s": "begin", "end_s": "end"}
_MARK = {"resource": "resource", "begin_s": "begin", "end_s": "end"}


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a trace; a reader sees the old file or the new one, never half of it.

    Args:
        trace: what to write. NaN and infinities in ``args`` become null, numpy scalars become numbers.
        path: of the JSON file; its directory must exist.
    """
    other = {"format": "dataflow", "version": VERSION, "meta": _plain(trace.meta)}
    with replaced(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"traceEvents": [')
        for i, event in enumerate(_events(trace)):
            file.write(",\n" if i else "\n")
            file.write(json.dumps(event, allow_nan=False, separators=(",", ":")))
        file.write('\n], "displayTimeUnit": "ms", "otherData": ')
        file.write(json.dumps(other, allow_nan=False) + "}\n")


def _events(trace: Trace) -> Iterator[dict[str, Any]]:
    name = " ".join(str(trace.meta[k]) for k in ("name", "policy") if trace.meta.get(k)) or "run"
    yield _about("process_name", 0, name=name)
    names: list[str] = []  # of the tracks; a track's tid is its place, from 1
    track_of: dict[int, int] = {}  # id(span) -> tid
    first: dict[str, int] = {}  # resource -> tid
    for resource in trace.resources:
        first[resource] = len(names) + 1
        for i, lane in enumerate(lanes(trace.on(resource)) or [[]]):
            names.append(resource if i == 0 else f"{resource} {i + 1}")
            track_of.update((id(span), len(names)) for span in lane)
    waits = {pool: found for pool in trace.pools if (found := exposed_waits(trace, pool))}
    below = {}  # tid of the track of a pool's waits -> tid of the pool's own
    for pool in waits:
        names.append(f"{pool} waits")
        below[len(names)] = first[pool]
    for tid, track in enumerate(names, start=1):
        yield _about("thread_name", tid, name=track)
        # The waits belong right below the pool's own track.
        place = 2 * below[tid] + 1 if tid in below else 2 * tid
        yield _about("thread_sort_index", tid, sort_index=place)
    for span in trace.spans:
        yield {
            **_complete(TASK, f"{span.stage} {span.label}", track_of[id(span)], span.begin, span.end),
            "args": _pack({key: getattr(span, name) for key, name in _SPAN.items()}, span.args),
        }
    for tid, found in zip(below, waits.values(), strict=True):
        for wait in found:
            yield {
                **_complete(WAIT, f"waits for {wait.cause}", tid, wait.begin, wait.end),
                "args": {"cause": wait.cause, "task": wait.task},
            }
    for i, mark in enumerate(trace.marks, start=1):
        common = {"cat": REQUEST, "name": mark.name, "id": hex(i), "pid": PID, "tid": first[mark.resource]}
        begin, end = _ticks(mark.begin, mark.end)
        own = {key: getattr(mark, name) for key, name in _MARK.items()}
        yield {"ph": "b", "ts": begin, **common, "args": _pack(own, mark.args)}
        yield {"ph": "e", "ts": end, **common}
    for time, level in in_flight(trace.marks):
        counter = {"ph": "C", "name": "rewards in flight", "pid": PID, "ts": round(time * 1e6)}
        yield {**counter, "args": {"requests": level}}
    for known in trace.levels:
        counter = {"ph": "C", "cat": LEVEL, "name": known.name, "pid": PID, "ts": round(known.at * 1e6)}
        # The exact time stands beside the args, all of which Perfetto would draw.
        yield {**counter, "at_s": known.at, "args": {"value": known.value}}


def _about(kind: str, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": PID, "tid": tid, "args": args}


def _complete(category: str, name: str, tid: int, begin: float, end: float) -> dict[str, Any]:
    ts, until = _ticks(begin, end)
    return {"ph": "X", "cat": category, "name": name, "pid": PID, "tid": tid, "ts": ts, "dur": until - ts}


def _ticks(begin: float, end: float) -> tuple[int, int]:
    ts = round(begin * 1e6)
    return ts, max(ts, round(end * 1e6))


def _pack(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Puts our facts and the user's side by side; a user's key that looks like ours gets a "+" in front."""
    clear = {f"+{k}" if k in own or k.startswith("+") else k: v for k, v in theirs.items()}
    return {k: _plain(v) for k, v in {**own, **clear}.items()}


def _plain(value: Any) -> Any:
    """What JSON can say of a value: Perfetto refuses a whole file for one NaN in it."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return _plain(value.tolist())
    return str(value)


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads what :func:`write` wrote, equal to the bit.

    Raises:
        DataError: no such file, no JSON, no trace of ours, or one of a newer version.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"trace {path}: {error.strerror or error}; give the trace.json of a run.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"trace {path} is not text; give the trace.json of a run.") from error
    if not text.strip():
        raise DataError(f"trace {path} is empty; give the trace.json of another run.")
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"trace {path} is not JSON ({error}); give the trace.json of a run.") from error
    other = data.get("otherData") if isinstance(data, dict) else None
    events = data.get("traceEvents") if isinstance(data, dict) else None
    if not isinstance(other, dict) or other.get("format") != "dataflow" or not isinstance(events, list):
        raise DataError(f"trace {path} was not written by dataflow; give the trace.json of a run.")
    version, meta = other.get("version"), other.get("meta")
    if not isinstance(version, int) or version > VERSION or not isinstance(meta, dict):
        raise DataError(f"trace {path} is of version {version}, this dataflow reads {VERSION}; install a newer one.")
    trace = Trace(meta=meta)
    for event in events:
        try:
            kind = (event["ph"], event.get("cat"))
            if kind == ("X", TASK):
                own, args = _unpack(_SPAN, event["args"])
                trace.add(Span(**own, args=args))
            elif kind == ("b", REQUEST):
                own, args = _unpack(_MARK, event["args"])
                trace.add(Mark(str(event["name"]), **own, args=args))
            elif kind == ("C", LEVEL):
                level = float(event["args"]["value"])
                trace.levels.append(Level(str(event["name"]), _seconds(event["at_s"]), level))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(
                f"trace {path} has a broken event ({type(error).__name__}: {error}) in "
                f"{json.dumps(event)[:80]}; give the trace.json of another run."
            ) from error
    return trace


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
