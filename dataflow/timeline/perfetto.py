"""Writes and reads a trace as a file of Trace Event JSON, which https://ui.perfetto.dev opens.

A file has a process per run, a track per resource (more if its tasks overlap), a track for the GPU's waits, async spans
for reward requests, arrows from samples to their rewards to their updates, and counters of requests in flight and of
limits. Timestamps are whole microseconds, so that neighbours on a track never overlap by rounding; the exact times are
in ``args``. docs/trace.md describes the format; :mod:`dataflow.timeline.writer` writes it.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dataflow.errors import DataError
from dataflow.files import decoded, nearest_run, no_file, replaced
from dataflow.timeline.spans import Level, Mark, Span, Trace
from dataflow.timeline.writer import FORMAT, LEVEL, MARK, REQUEST, SPAN, TASK, TraceWriter

_SHARE = 1000  # items per write


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a whole trace; the file is replaced atomically.

    Args:
        trace: to write. NaN and infinities in ``args`` become null, numpy scalars become numbers.
        path: of the JSON file; its directory must exist.

    Raises:
        ValueError: a time is NaN or infinite.
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
    """Reads the trace of a run, given its directory or its file.

    Raises:
        DataError: there is no such run, or see :func:`read`.
    """
    path = Path(run)
    if path.is_dir():
        path = path / "trace.json"
    if (why := no_file(path)) is not None:
        where = "" if path == Path(run) else f"{path}: "
        raise DataError(f"no run at '{run}': {where}{why}{nearest_run(run) or '; give a run directory (runs/NAME).'}")
    return read(path)


def read(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace from its file; equal, bit for bit, to the one written. Also reads files that were cut off.

    Args:
        path: of a file that :func:`write` or a run wrote; may be compressed, as ``.gz``. If its end is missing,
            ``meta["status"]`` is "cut off", and ``meta["cut"]`` is a sentence that describes what is missing.

    Raises:
        DataError: the file does not exist, is not JSON, or no trace of dataflow.
    """
    try:
        data = Path(path).read_bytes()
        text = decoded(gzip.decompress(data) if Path(path).suffix == ".gz" else data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"trace {path} is not a complete gzip file ({error}); compress it again.") from error
    except OSError as error:
        raise DataError(f"trace {path}: {error.strerror or error}; give the trace.json of a run.") from error
    except ValueError as error:
        raise DataError(f"trace {path} is not text ({error}); give the trace.json of a run.") from error
    if not text.strip():
        raise DataError(f"trace {path} is empty; give the trace.json of another run.")
    events, header = _parse(text, path)
    meta = header.get("meta")
    if not isinstance(meta, dict):
        raise DataError(f"trace {path} has no description of its run; give the trace.json of another run.")
    if (wrong := _misfit(meta, _META, "meta")) is not None:
        raise DataError(f"trace {path} describes its run wrongly ({wrong}); give the trace.json of another run.")
    trace = Trace(meta=meta)
    for event in events:
        try:
            _take(trace, event)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(
                f"trace {path} has a broken event ({type(error).__name__}: {error}) in "
                f"{json.dumps(event)[:80]}; give the trace.json of another run."
            ) from error
    if header.get("open"):
        meta["cut"] = _cut(trace)
        if meta.get("status") == "running":
            meta["status"] = "cut off"
    return trace


def _parse(text: str, path: str | os.PathLike[str]) -> tuple[list[Any], dict[str, Any]]:
    """Returns a file's events and its last description: meta, and whether the file is still open."""
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        if not text.lstrip().startswith("["):
            raise DataError(f"trace {path} is not JSON ({error}); give the trace.json of a run.") from error
        data = _lines(text, path)
    other: Any = None
    if isinstance(data, dict):
        # Saved by another program in the format's object form.
        other, data = data.get("otherData"), data.get("traceEvents")
    events = data if isinstance(data, list) else []
    for event in events:
        if isinstance(event, dict) and event.get("ph") == "M" and isinstance(args := event.get("args"), dict):
            other = args if args.get("format") == FORMAT else other
    if not isinstance(data, list) or not isinstance(other, dict) or other.get("format") != FORMAT:
        raise DataError(f"trace {path} was not written by dataflow; give the trace.json of a run.")
    return events, other


def _lines(text: str, path: str | os.PathLike[str]) -> list[Any]:
    """Returns the events of a file without its end: one per line; the last line may be incomplete."""
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


_NUMBER, _NONE = (int, float), type(None)
_STAGE = {"name": str, "on": str, "role": (str, _NONE), "every?": (int, _NONE), "reads": [[object]], "writes": [str]}
_LIMITS = {
    "concurrency?": (*_NUMBER, _NONE),
    "rpm?": (*_NUMBER, _NONE),
    "tpm?": (*_NUMBER, _NONE),
}
_SIZES = dict.fromkeys(("prompts?", "responses?", "mini_batches?"), (int, _NONE))
_JOB = {"pipeline?": {"stages?": [_STAGE]}, "agents?": {str: _LIMITS}, **_LIMITS, **_SIZES}
_META: dict[Any, Any] = {
    **dict.fromkeys(("status?", "cut?"), str),
    "steps?": (int, _NONE),
    "resources?": {str: (int, _NONE)},
    "policies?": [{"step": int}],
    "job?": _JOB,
}
"""What is read of a trace's description; a ``?`` marks what may be missing, the key ``str`` stands for any name."""


def _misfit(value: Any, shape: Any, where: str) -> str | None:
    """Returns the place where a value from JSON does not have a shape, as a clause; None if it has the shape."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{where} is no object"
        rows = [(name, shape[str]) for name in value] if str in shape else list(shape.items())
        for key, inner in rows:
            name = key if str in shape else key.removesuffix("?")
            if name not in value and name == key:
                return f"{where} has no {name}"
            if name in value and (wrong := _misfit(value[name], inner, f"{where}.{name}")) is not None:
                return wrong
        return None
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{where} is no list"
        places = (_misfit(each, shape[0], f"{where}[{i}]") for i, each in enumerate(value))
        return next((wrong for wrong in places if wrong is not None), None)
    # JSON's true and false are no numbers, as which Python counts them.
    fits = shape is object or type(value) in (shape if isinstance(shape, tuple) else (shape,))
    return None if fits else f"{where} is {json.dumps(value)[:40]}"


def _take(trace: Trace, event: Any) -> None:
    kind = (event["ph"], event.get("cat"))
    if kind == ("X", TASK):
        own, args = _unpack(SPAN, event["args"])
        if own["end"] < own["begin"]:
            raise ValueError(f"it ends at {own['end']:g} s, before its begin at {own['begin']:g} s")
        if args.get("emitted_s"):
            args["emitted_s"] = [_seconds(at) for at in args["emitted_s"]]
        trace.add(Span(**own, args=args))
    elif kind == ("b", REQUEST):
        own, args = _unpack(MARK, event["args"])
        trace.add(Mark(str(event["name"]), **own, args=args))
    elif kind == ("C", LEVEL):
        trace.add(Level(str(event["name"]), _seconds(event["at_s"]), float(event["args"]["value"])))


def _cut(trace: Trace) -> str:
    if not trace.spans:
        return "cut off before its first task had ended: the run was killed, or is still running"
    end = max(s.end for s in trace.spans)
    last = max(trace.spans, key=lambda s: s.end).task
    return f"cut off after {end:.1f} s: the run was killed, or is still running; its last task was {last}"


def _unpack(keys: Mapping[str, str], args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    own = {name: _KINDS[name](args[key]) for key, name in keys.items()}
    return own, {k.removeprefix("+"): v for k, v in args.items() if k not in keys}


_LARGEST = 2**31 - 1
"""Largest step or part that the arrays of a page take, and the largest time in seconds."""


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST:
        raise ValueError(f"time {value}")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
        raise ValueError(f"{value} is no number of a step or a part")
    return value


_KINDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("stage", "resource", "waited_for"), str),
    **dict.fromkeys(("step", "part", "parts"), _count),
    **dict.fromkeys(("begin", "end"), _seconds),
}
