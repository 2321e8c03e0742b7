"""The profiles of a run (``profile.steps``): merged with its trace for Perfetto, and what its spans say of them."""

from __future__ import annotations

from pathlib import Path

from loguru import logger

from dataflow.drawing.duration import seconds
from dataflow.errors import DataError
from dataflow.timeline.merge import merge
from dataflow.timeline.spans import Trace

DIRECTORY = "profile"
"""Directory of a run that holds its profiles."""
MERGED = "merged.json"
"""The trace with them, in the same directory."""


def profiles_of(run: str | Path) -> list[Path]:
    """Returns the profiles of a run, by its directory or its trace."""
    path = Path(run)
    return sorted(((path if path.is_dir() else path.parent) / DIRECTORY).glob("[!.]*.json.gz"))


def merge_profiles(run: Path, trace: Trace) -> Path | None:
    """Writes the trace with the run's profiles; returns the file, None without any.

    A profile that cannot be read is a warning: the run itself is complete without it.
    """
    found = profiles_of(run)
    if not found:
        return None
    out = run / DIRECTORY / MERGED
    try:
        merge(trace, found, out)
    except DataError as error:
        logger.warning(f"the profiles are not merged with the trace: {error}")
        return None
    return out


def profile_lines(trace: Trace) -> list[str]:
    """Returns a line for each profiled task: its time, and the operators that took most of it."""
    profiled = [span for span in trace.spans if "profile" in span.args]
    if not profiled:
        return []
    wide = max(len(span.task) for span in profiled)
    lines = [
        f"  {span.task:<{wide}}  {seconds(span.end - span.begin):>7}  {span.args.get('operators', '')}"
        for span in sorted(profiled, key=lambda span: span.begin)
    ]
    return [f"profiled ({DIRECTORY}/{MERGED} has all of it, for Perfetto):", *lines]
