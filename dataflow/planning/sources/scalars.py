"""Reads the scalars that verl logs at each step, from a CSV with one column each or from TensorBoard's event files."""

from __future__ import annotations

import csv
import io
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflow.errors import DataError, nearest
from dataflow.files import decoded

REQUIRED = ("timing_s/gen", "timing_s/update_actor")
_SECONDS = "timing_s/"
# The timings that a CSV may name without the prefix.
_BARE = ["gen", "reward", "old_log_prob", "ref", "values", "adv", "update_actor", "update_critic"]
_BARE += ["testing", "save_checkpoint", "step"]
_STEP = ("global_step", "step")
_GIVE = "give verl's tensorboard directory, or a CSV of its scalars"


@dataclass(frozen=True)
class Scalars:
    """Logged numbers.

    Attributes:
        path: the file or directory they were read from.
        columns: name -> {step: value}, names as verl logs them (``timing_s/gen``), steps ascending, none empty.
    """

    path: str
    columns: Mapping[str, Mapping[int, float]]

    def series(self, name: str) -> dict[int, float]:
        """Returns a scalar's values by step; empty if it was never logged."""
        return dict(self.columns.get(name, {}))


def looks_like(path: str | os.PathLike[str]) -> bool:
    """True if this is a CSV, an event file or a directory of event files, judged by names alone."""
    place = Path(path)
    return (place.suffix.lower() == ".csv" and place.is_file()) or next(_event_files(place), None) is not None


def read_scalars(path: str | os.PathLike[str], timings: Sequence[str] = REQUIRED) -> Scalars:
    """Reads the scalars of one run.

    Args:
        path: a CSV with a column ``global_step`` or ``step``, its cells empty where nothing was logged; an event
            file; or a directory of them, including those in subdirectories. If a resumed run logged a step twice,
            the later value counts.
        timings: scalars that are required, each at one step at least.

    Raises:
        DataError: there is nothing to read, one of ``timings`` is missing, or a value is invalid.
    """
    place = Path(path)
    files = sorted(_event_files(place), key=_begun)
    if not files and place.is_dir():
        raise DataError(f"log {path}: the directory holds no event files; {_GIVE}.")
    columns = _from_events(place, files) if files else _from_csv(place, timings)
    kept: dict[str, dict[int, float]] = {}
    for name, series in columns.items():
        for step, value in sorted(series.items()):
            if name.startswith(_SECONDS) and not 0 <= value < math.inf:
                raise DataError(f"log {path}: {name} at step {step} is {value:g}; give finite seconds of 0 or more.")
            if not math.isnan(value):
                kept.setdefault(name, {})[step] = value
    _require(timings, list(kept), f"log {path}: no step has a value of")
    return Scalars(str(path), kept)


def _require(timings: Sequence[str], names: Sequence[str], trouble: str) -> None:
    missing = [name for name in timings if name not in names]
    if missing:
        # Without their prefix, which would make all timings look similar.
        word = missing[0].rpartition("/")[2]
        alike = [name for name in names if nearest(word, [name.rpartition("/")[2]])]
        hint = nearest(missing[0], alike) or nearest(word, alike) or f"; {_GIVE}."
        raise DataError(f"{trouble} {', '.join(missing)}{hint}")


def _event_files(place: Path) -> Iterator[Path]:
    if _is_events(place.name) and place.is_file():
        yield place
    for folder, _, names in os.walk(place):
        yield from (Path(folder, name) for name in names if _is_events(name))


def _is_events(name: str) -> bool:
    # The profiler's file holds no events.
    return "tfevents" in name and not name.endswith((".profile-empty", ".csv"))


def _begun(path: Path) -> list[str | int]:
    """Returns a sort key by creation time: names contain the seconds, then the number of a process's writer."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _from_events(place: Path, files: Sequence[Path]) -> dict[str, dict[int, float]]:
    latest: dict[tuple[str, int], tuple[float, float, Path]] = {}  # (name, step) -> wall time, value, file
    for file in files:
        for name, step, time, value in _events(file):
            before = latest.get((name, step))
            if before and before[2].parent != file.parent:
                raise DataError(
                    f"log {place}: {name} of step {step} is in {before[2]} as well as in {file}; "
                    "give the directory of one run."
                )
            if not before or time >= before[0]:
                latest[name, step] = time, value, file
    if not latest:
        empty = "holds no scalars" if any(file.stat().st_size for file in files) else "is empty"
        raise DataError(f"log {place} {empty}; {_GIVE}.")
    columns: dict[str, dict[int, float]] = {name: {} for name, _ in latest}
    for (name, step), (_, value, _) in latest.items():
        columns[name][step] = value
    return columns


def _events(file: Path) -> Iterator[tuple[str, int, float, float]]:
    """Yields the name, step, wall time and value of each scalar in an event file."""
    import tensorboard.backend.event_processing.event_accumulator as tb
    from numpy import float32

    logger = logging.getLogger("tensorboard")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        events = tb.EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
    except Exception as error:  # a broken file fails anywhere in TensorBoard or protobuf
        why = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise DataError(f"log {file} cannot be read as events ({why}); {_GIVE}.") from error
    finally:
        logger.setLevel(level)
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            # The file stores 32 bits: a logged 44.7915 would otherwise become 44.79150009.
            value = event.value if event.value.is_integer() else float(str(float32(event.value)))
            yield name, event.step, event.wall_time, value


def _from_csv(place: Path, timings: Sequence[str]) -> dict[str, dict[int, float]]:
    try:
        text = decoded(place.read_bytes())
        reader = csv.reader(io.StringIO(text), strict=True, skipinitialspace=True)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except OSError as error:
        raise DataError(f"log {place}: {error.strerror or error}; {_GIVE}.") from error
    except (ValueError, csv.Error) as error:
        raise DataError(f"log {place} is not CSV ({error}); {_GIVE}.") from error
    if "\0" in text:
        raise DataError(f"log {place} is not CSV (it holds null bytes); {_GIVE}.")
    if not rows:
        raise DataError(f"log {place} is empty; {_GIVE}.")
    header = rows.pop(0)[1]
    if (key := next((name for name in _STEP if name in header), None)) is None:
        hint = nearest("global_step", header) or "; give a CSV, with commas, that has one (or one named step)."
        raise DataError(f"log {place}: no column global_step{hint}")
    names = _full(header, key, timings)
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"log {place}: two columns are named '{twice[0]}'; leave one.")
    _require(timings, names, f"log {place}: no column")
    columns: dict[str, dict[int, float]] = {name: {} for name in names if name != key}
    seen: dict[int, int] = {}  # step -> line
    for line, row in rows:
        where = f"log {place}, line {line}"
        if len(row) != len(names):
            raise DataError(f"{where}: {len(row)} cells under {len(names)} columns; give a cell a column.")
        cells = dict(zip(names, row, strict=True))
        at = _number(cells[key], f"{where}, column {key}", "the step's number")
        if not (at >= 0 and at.is_integer()):
            raise DataError(f"{where}: step {cells[key]} is not a whole number; give steps of 0, 1, 2 and so on.")
        if (step := int(at)) in seen:
            raise DataError(f"{where}: step {step} was on line {seen[step]} already; leave one, of one run.")
        seen[step] = line
        for name in columns:
            if cell := cells[name]:
                columns[name][step] = _number(cell, f"{where} (step {step}), column {name}", "a number, or nothing")
    return columns


def _full(header: Sequence[str], key: str, timings: Sequence[str]) -> list[str]:
    """Returns the columns' names, with the prefix added to known timings that lack it."""
    # Beside a column timing_s/gen, a column "reward" is more likely a score than a duration.
    bare = not any(name.startswith(_SECONDS) for name in header)
    known = {name: _SECONDS + name for name in _BARE if name != key and (bare or _SECONDS + name in timings)}
    return [name if known.get(name) in (None, *header) else known[name] for name in header]


def _number(cell: str, where: str, give: str) -> float:
    try:
        return float(cell)
    except ValueError as error:
        raise DataError(f"{where}: '{cell[:40]}' is not a number; give {give}.") from error
