"""Reads the scalars that verl logs at each step, from its console, jsonl, a CSV, TensorBoard or MLflow."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataflow.errors import DataError
from dataflow.planning.sources.logs.events import begun, event_files, read_events
from dataflow.planning.sources.logs.lines import is_console, read_console, read_jsonl
from dataflow.planning.sources.logs.mlflow import metric_folders, read_mlflow
from dataflow.planning.sources.logs.needed import GIVE, SECONDS, Columns, require
from dataflow.planning.sources.logs.table import read_table

_LAST_STEP = 10**12
_LONGEST_S = 1e9
"""Some 30 years. What is larger is no measurement, and its squares and sums would overflow."""
REQUIRED = ("timing_s/gen", "timing_s/update_actor")
_OWN = ("overlap/exposed_wait_s", "overlap/gpu_busy_frac")
"""What each run of dataflow logs at each step, under any policy, and verl never."""


@dataclass(frozen=True)
class Scalars:
    """Logged numbers.

    Attributes:
        path: the file or directory they were read from.
        columns: name -> {step: value}, names as verl logs them (``timing_s/gen``), steps ascending, none empty.
        said: sentences on how they were read.
    """

    path: str
    columns: Mapping[str, Mapping[int, float]]
    said: tuple[str, ...] = ()

    def series(self, name: str) -> dict[int, float]:
        """Returns a scalar's values by step; empty if it was never logged."""
        return dict(self.columns.get(name, {}))


def looks_like(path: str | os.PathLike[str]) -> bool:
    """True if a path seems to hold scalars: by its name, or by a step's line in the text of a file."""
    place = Path(path)
    if place.is_file() and (place.suffix.lower() in (".csv", ".jsonl") or is_console(place)):
        return True
    return any(next(found(place), None) is not None for found in (event_files, metric_folders))


def read_scalars(path: str | os.PathLike[str], timings: Sequence[str] = REQUIRED) -> Scalars:
    """Reads the scalars of one run.

    Args:
        path: a CSV with a column ``global_step``, ``step`` or ``_step``, its cells empty where nothing was logged; a
            jsonl file or a console log; an event file, or a directory of them, including those in subdirectories; or
            MLflow's directory of a run. If a resumed run logged a step twice, the later value counts.
        timings: scalars that are required, each at one step at least.

    Raises:
        DataError: there is nothing to read, one of ``timings`` is missing, a value is invalid, or the log is one of
            dataflow's own.
    """
    place = Path(path)
    kept: dict[str, dict[int, float]] = {}
    said: list[str] = []
    columns = _read(place, timings, said)
    _refuse_own(place, columns)
    for name, series in columns.items():
        for step, value in sorted(series.items()):
            if step > _LAST_STEP:
                raise DataError(
                    f"log {path}: step {step:.0f} of {name} is over {_LAST_STEP:g}; give steps as verl does."
                )
            if name.startswith(SECONDS) and not 0 <= value <= _LONGEST_S:
                raise DataError(f"log {path}: {name} at step {step} is {value:g}; give seconds, 0 to {_LONGEST_S:g}.")
            if not math.isnan(value):
                kept.setdefault(name, {})[step] = value
    require(timings, list(kept), f"log {path}: no step has a value of")
    return Scalars(str(path), kept, tuple(said))


def _refuse_own(place: Path, columns: Columns) -> None:
    """Rejects the metrics of a dataflow run: its waits and its ``timing_s/reward`` mean other things than verl's.

    Raises:
        DataError: they are; the message names the run's directory if it is near.
    """
    if not all(name in columns for name in _OWN):
        return
    below = list(place.glob("*/trace.json"))
    around = [folder for folder in place.absolute().parents[:2] if (folder / "trace.json").is_file()]
    found = below[0].parent if len(below) == 1 else next(iter(around), None)
    named = f"give its directory instead, {found}" if found else "give its directory, which has its trace.json, instead"
    raise DataError(f"log {place} is of a run of dataflow, not of verl's own loop ({_OWN[0]}); {named}.")


def _read(place: Path, timings: Sequence[str], said: list[str]) -> Columns:
    if files := sorted(event_files(place), key=begun):
        return read_events(place, files, said)
    if place.is_dir():
        if next(metric_folders(place), None) is None:
            raise DataError(f"log {place}: the directory holds no event files; {GIVE}.")
        return read_mlflow(place)
    if place.suffix.lower() == ".jsonl":
        return read_jsonl(place, said)
    if place.suffix.lower() != ".csv" and is_console(place):
        return read_console(place, said)
    return read_table(place, timings)
