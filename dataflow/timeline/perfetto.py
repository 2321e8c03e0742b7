"""A trace as a file of Trace Event JSON, which https://ui.perfetto.dev opens: written whole, and read.

A file has a process per run, a track per resource (more if its tasks overlap), a track for the GPU's waits, async spans
for reward requests, and counters of requests in flight and of limits. Timestamps are whole microseconds, so that
neighbours on a track never overlap by rounding; the exact times are in ``args``. docs/trace.md describes the format;
:mod:`dataflow.timeline.writer` writes it.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dataflow.errors import DataError
from dataflow.files import decoded, nearest_run, no_file, replaced
from dataflow.timeline.spans import Level, Mark, Span, Trace
from dataflow.timeline.writer import FORMAT, TraceWriter

_SHARE = 1000  # items per write
_SPAN = ("stage", "step", "part", "parts", "resource", "waited_for")


def write(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a whole trace; the file is replaced atomically.

    Args:
        trace: to write. NaN and infinities in ``args`` become null, numpy scalars become numbers.
        path: of the JSON file; its directory must exist.

    Raises:
        RunError: the file cannot be written.
    """
    items: list[Span | Mark | Level] = [*trace.spans, *trace.marks, *trace.levels]
    with replaced(path) as temporary, TraceWriter(temporary, trace.meta) as writer:
        for i in range(0, len(items), _SHARE):
            writer.add(*items[i : i + _SHARE])
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
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(f"trace {path} cannot be read ({error}); give the trace.json of a run.") from error
    trace, header = Trace(), dict[str, Any]()
    for event in _events(text, path):
        try:
            if event["ph"] == "M":
                header = event["args"] if event["args"].get("format") == FORMAT else header
            elif (item := _item(event)) is not None:
                trace.add(item)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"trace {path} was not written by dataflow; give the trace.json of a run.") from error
    if not header:
        raise DataError(f"trace {path} was not written by dataflow; give the trace.json of a run.")
    trace.meta = header["meta"]
    if header.get("open"):
        trace.meta["cut"] = _cut(trace)
        if trace.meta.get("status") == "running":
            trace.meta["status"] = "cut off"
    return trace


def _events(text: str, path: str | os.PathLike[str]) -> Iterator[Any]:
    """Yields the events of a file, one per line; the last line of a file without its end may be incomplete."""
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        bare = line.strip().removesuffix(",")
        if bare in ("", "[", "]"):
            continue
        try:
            yield json.loads(bare)
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise DataError(
                    f"trace {path} has no event in line {number}: {bare[:80]!r}; give the trace.json of a run."
                ) from error


def _item(event: dict[str, Any]) -> Span | Mark | Level | None:
    """Returns what an event records; None for one that is derived from others."""
    kind, args = (event["ph"], event.get("cat")), event.get("args", {})
    if kind == ("X", "task"):
        own = {name: args.pop(name) for name in _SPAN}
        return Span(**own, begin=args.pop("begin_s"), end=args.pop("end_s"), args=args)
    if kind == ("b", "request"):
        return Mark(event["name"], args.pop("resource"), args.pop("begin_s"), args.pop("end_s"), args)
    return Level(event["name"], event["at_s"], args["value"]) if kind == ("C", "level") else None


def _cut(trace: Trace) -> str:
    if not trace.spans:
        return "cut off before its first task had ended: the run was killed, or is still running"
    last = max(trace.spans, key=lambda s: s.end)
    return f"cut off after {last.end:.1f} s: the run was killed, or is still running; its last task was {last.task}"
