"""Reads the scalars that verl logs at each step: its console, its jsonl file, TensorBoard's event files or a CSV."""

from __future__ import annotations

import ast
import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from dataflow.errors import DataError, nearest

SECONDS = "timing_s/"
REQUIRED = ("timing_s/gen", "timing_s/update_actor")
_OWN = "overlap/exposed_wait_s"
"""What each run of dataflow logs at each step, and verl never."""
_GIVE = "give verl's console log, its jsonl file or tensorboard directory, or a CSV of its scalars"

# A step's line of verl's console logger; Ray writes the actor's name before it, in colour.
_LINE = re.compile(r"(?:^|[\s)>\]m])step:(\d{1,12}) - (?=\S+:)")
_VALUE = re.compile(r"(?:np\.\w{1,20}\(|tensor\()?([^(),\s]{1,40})")
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_HEAD = 200_000
"""Lines in which the first line of a step, and the printed configuration, are looked for."""
# Python's pprint of verl's configuration: sorted keys, further lines indented.
_CONFIGURATION = re.compile(r"^(\(.{1,80}?pid=\d{1,10}.{0,60}?\) )?\{'actor_rollout_ref': \{")
_STEP = ("global_step", "step", "_step", "Step")
"""What a CSV may call its column of steps."""

Reader = Callable[[Path], Iterator[tuple[int, str, float]]]
"""Yields (step, name, value) of the scalars in a log."""


class Scalars(dict[str, dict[int, float]]):
    """The scalars of a run: name -> {step: value}, names as verl logs them (``timing_s/gen``), steps ascending."""

    def series(self, name: str) -> dict[int, float]:
        """Returns a scalar's values by step; empty if it was never logged."""
        return self.get(name, {})

    def mean(self, name: str) -> float:
        """Returns the mean of a scalar; 0 if it was never logged."""
        series = self.series(name)
        return math.fsum(series.values()) / len(series) if series else 0.0


def reader_of(place: Path) -> Reader | None:
    """Returns what reads the log at a path; None if there is no log."""
    if any(_event_files(place)):
        return _events
    if place.is_dir():
        return None
    by_name: Reader | None = {".jsonl": _jsonl, ".csv": _table}.get(place.suffix.lower())
    return by_name or (_console if any(_LINE.search(line) for line in islice(_lines(place), _HEAD)) else None)


def read_scalars(path: Path) -> Scalars:
    """Reads the scalars of one run; if a resumed run logged a step twice, the later value counts.

    The file is a console log; a jsonl file of objects ``{"step": 1, "data": {...}}``; an event file or a directory of
    them; or a CSV with a column ``global_step``, ``step`` or ``_step``.
    """
    reader = reader_of(path)
    if reader is None:
        raise DataError(f"log {path}: no step of verl is in it; {_GIVE}.")
    columns = Scalars()
    try:
        for step, name, value in reader(path):
            if name.startswith(SECONDS) and value < 0:
                raise DataError(f"log {path}: {name} at step {step} is {value:g}; give seconds.")
            if not math.isnan(value):
                columns.setdefault(name, {})[step] = value
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"log {path} cannot be read ({error}); {_GIVE}.") from error
    if _OWN in columns:
        raise DataError(
            f"log {path} is of a run of dataflow, not of verl's own loop ({_OWN}); give the run's directory, which has "
            "its trace.json, instead."
        )
    if missing := [name for name in REQUIRED if name not in columns]:
        timed = [name for name in columns if name.startswith(SECONDS)]
        there = f" (it has {', '.join(timed[:12])})" if timed else ""
        hint = nearest(missing[0], columns.keys() - set(REQUIRED)) or f"; {_GIVE}."
        raise DataError(f"log {path}: no step has a value of {', '.join(missing)}{there}{hint}")
    return Scalars({name: dict(sorted(series.items())) for name, series in columns.items()})


def printed_settings(path: Path) -> Mapping[str, Any]:
    """Returns the configuration that verl prints into the console, as nested mappings; {} if a log has none."""
    if not path.is_file() or path.suffix.lower() in (".csv", ".jsonl"):
        return {}
    lines = islice(_lines(path), _HEAD)
    for line in lines:
        if (begin := _CONFIGURATION.match(line)) is not None:
            prefix = begin[1] or ""
            own = (each.removeprefix(prefix) for each in lines if each.startswith(prefix))
            text = "\n".join([line.removeprefix(prefix), *takewhile(lambda each: each.startswith(" "), own)])
            try:
                return dict(ast.literal_eval(text))
            except (ValueError, SyntaxError):
                return {}  # cut off, or mixed with other lines: then the settings have to be given
    return {}


def _lines(path: Path) -> Iterator[str]:
    """Yields the lines of a text; a progress bar ends its own with a carriage return alone."""
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for line in file:
            yield _COLOUR.sub("", line.rstrip("\n"))


def _console(path: Path) -> Iterator[tuple[int, str, float]]:
    for line in _lines(path):
        if (found := _LINE.search(line)) is None:
            continue
        for pair in line[found.end() :].split(" - "):
            name, _, text = pair.strip().rpartition(":")
            if name and (value := _VALUE.match(text)):
                try:
                    yield int(found[1]), name, float(value[1])
                except ValueError:
                    continue  # a text among the scalars


def _jsonl(path: Path) -> Iterator[tuple[int, str, float]]:
    lines = [line for line in _lines(path) if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return  # it was cut off when the run ended
            raise ValueError(f"line {number}: {error}") from error
        for name, value in dict(row.get("data", row)).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield int(row["step"] if "step" in row else row["_step"]), name, float(value)


def _table(path: Path) -> Iterator[tuple[int, str, float]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.DictReader(file, skipinitialspace=True)
        key = next((name for name in _STEP if name in (rows.fieldnames or ())), None)
        if key is None:
            hint = nearest("global_step", rows.fieldnames or ()) or "; give a CSV, with commas, that has one."
            raise DataError(f"log {path}: no column global_step{hint}")
        for row in rows:
            step = row.pop(key)
            for name, text in row.items() if step else ():
                try:
                    value = float(text or "nan")  # nothing was logged at this step
                except (ValueError, TypeError) as error:
                    if name is not None and name.startswith(SECONDS):
                        raise ValueError(f"line {rows.line_num}, column {name}: {error}") from error
                    continue  # a text among the scalars
                yield int(float(step)), name, value


def _events(path: Path) -> Iterator[tuple[int, str, float]]:
    if find_spec("tensorboard") is None:
        raise DataError(
            f"log {path}: event files are read by TensorBoard; pip install tensorboard, or give another form."
        )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folders = sorted({file.parent for file in _event_files(path)})
    if len(folders) > 1:
        raise DataError(
            f"log {path}: there are event files in {folders[0]} and in {folders[1]}; give one run's directory."
        )
    read = EventAccumulator(str(path if path.is_file() else folders[0]), size_guidance={"scalars": 0})  # 0: all steps
    read.Reload()
    for name in read.Tags()["scalars"]:
        for event in read.Scalars(name):
            yield event.step, name, event.value


def _event_files(place: Path) -> Iterator[Path]:
    files = place.rglob("*") if place.is_dir() else iter([place])
    return (file for file in files if "tfevents" in file.name and file.is_file() and file.suffix != ".profile-empty")
