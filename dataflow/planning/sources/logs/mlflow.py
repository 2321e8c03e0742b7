"""Reads MLflow's directory of a run: a file for each metric, ``metrics/timing_s/gen``, with a line for each value."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from dataflow.errors import DataError
from dataflow.planning.sources.logs.needed import GIVE, SECONDS, Columns, number


def metric_folders(place: Path) -> Iterator[Path]:
    """Yields the directories ``metrics`` of runs at or below a path that have verl's timings."""
    for folder, names, _ in os.walk(place):
        if Path(folder).name == "metrics" and SECONDS.rstrip("/") in names:
            names.clear()
            yield Path(folder)


def read_mlflow(place: Path) -> Columns:
    """Returns the metrics of one run; of a step's several values the last one counts.

    Raises:
        DataError: a file cannot be read, or there are several runs.
    """
    folders = sorted(metric_folders(place))
    if len(folders) > 1:
        first, second = (folder.parent for folder in folders[:2])
        raise DataError(f"log {place}: it has the runs {first.name} and {second.name}; give the directory of one run.")
    columns: Columns = {}
    for file in sorted(folders[0].rglob("*")):
        if not file.is_file():
            continue
        try:
            lines = file.read_text("utf-8", "replace").splitlines()
        except OSError as error:
            raise DataError(f"log {file}: {error.strerror or error}; {GIVE}.") from error
        for at, line in enumerate(lines, 1):
            _time, value, step, *_ = [*line.split(), "", "", ""]
            where = f"log {file}, line {at}"
            of = columns.setdefault(file.relative_to(folders[0]).as_posix(), {})
            of[int(number(step, where, "lines 'time value step'"))] = number(value, where, "lines 'time value step'")
    return columns
