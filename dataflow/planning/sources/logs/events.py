"""Reads TensorBoard's event files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from dataflow.errors import DataError
from dataflow.planning.sources.logs.needed import GIVE, Columns
from dataflow.planning.sources.logs.tfevents import event_class, records


def event_files(place: Path) -> Iterator[Path]:
    """Yields the event files at or below a path."""
    if _is_events(place.name) and place.is_file():
        yield place
    for folder, _, names in os.walk(place):
        yield from (Path(folder, name) for name in names if _is_events(name))


def _is_events(name: str) -> bool:
    # The profiler's file holds no events.
    return "tfevents" in name and not name.endswith((".profile-empty", ".csv"))


def begun(path: Path) -> list[str | int]:
    """Returns a sort key by creation time: names contain the seconds, then the number of a process's writer."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def read_events(place: Path, files: Sequence[Path], said: list[str]) -> Columns:
    """Returns the scalars of event files; if a resumed run logged a step twice, the later value counts.

    Args:
        place: that was given.
        files: in the order of their creation.
        said: gets a sentence if two files have the same step.

    Raises:
        DataError: a file cannot be read, there is nothing in them, or they are of several runs.
    """
    latest: dict[tuple[str, int], tuple[float, float, Path]] = {}  # (name, step) -> wall time, value, file
    twice: set[int] = set()
    for file in files:
        for name, step, time, value in _events(file):
            before = latest.get((name, step))
            if before and before[2].parent != file.parent:
                raise DataError(
                    f"log {place}: {name} of step {step} is in {before[2]} as well as in {file}; "
                    "give the directory of one run."
                )
            if before and before[2] != file:
                twice.add(step)
            if not before or time >= before[0]:
                latest[name, step] = time, value, file
    if not latest:
        empty = "holds no scalars" if any(file.stat().st_size for file in files) else "is empty"
        raise DataError(f"log {place} {empty}; {GIVE}.")
    if twice:
        said.append(
            f"several event files have the steps from {min(twice)} to {max(twice)}: the later values were taken, as of "
            "a run that was resumed (if they are of another run, leave the files of one)."
        )
    columns: Columns = {name: {} for name, _ in latest}
    for (name, step), (_, value, _) in latest.items():
        columns[name][step] = value
    return columns


def _events(file: Path) -> Iterator[tuple[str, int, float, float]]:
    """Yields the name, step, wall time and value of each scalar in an event file."""
    from google.protobuf.message import DecodeError
    from numpy import float32

    try:
        for record in records(file):
            event = event_class().FromString(record)
            for scalar in event.summary.value:
                if scalar.HasField("simple_value"):
                    value = scalar.simple_value
                    # The file stores 32 bits: a logged 44.7915 would otherwise become 44.79150009.
                    value = value if value.is_integer() else float(str(float32(value)))
                    yield scalar.tag, event.step, event.wall_time, value
    except (OSError, DecodeError) as error:
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise DataError(f"log {file} cannot be read as events ({why}); {GIVE}.") from error
