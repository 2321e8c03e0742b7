"""Reads a CSV of scalars: one column each, as TensorBoard or W&B exports them, or one row for each value, as MLflow."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from dataflow.errors import DataError, counted, nearest
from dataflow.files import decoded
from dataflow.planning.sources.logs.needed import (
    EACH_STEP,
    GIVE,
    NOW_AND_THEN,
    SECONDS,
    WHOLE,
    Columns,
    number,
    require,
)

# The timings that a CSV may name without the prefix.
_BARE = [*EACH_STEP, *NOW_AND_THEN, WHOLE]
_STEP = ("global_step", "step", "_step", "Step")
# W&B's: a chart's export has the column "Step", and with it "RUN - NAME" and its __MIN and __MAX; a history "_step".
_CHART, _HISTORY = "Step", "_step"
_RUN = ("run", "run_id", "run_name", "run_uuid", "name")
"""Columns that tell runs apart, in lower case."""
_NAME = ("key", "metric", "metric_key")
_Rows = list[tuple[int, list[str]]]
"""(line, cells)."""


def read_table(place: Path, timings: Sequence[str]) -> Columns:
    """Returns the scalars of a CSV.

    Args:
        place: the file.
        timings: scalars that are required.

    Raises:
        DataError: it is no CSV, lacks a column, has several runs, or a cell is no number.
    """
    try:
        text = decoded(place.read_bytes())
        reader = csv.reader(io.StringIO(text), strict=True, skipinitialspace=True)
        rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(row)]
    except OSError as error:
        raise DataError(f"log {place}: {error.strerror or error}; {GIVE}.") from error
    except (ValueError, csv.Error) as error:
        raise DataError(f"log {place} is not CSV ({error}); {GIVE}.") from error
    if "\0" in text:
        raise DataError(f"log {place} is not CSV (it holds null bytes); {GIVE}.")
    if not rows:
        raise DataError(f"log {place} is empty; {GIVE}.")
    header = rows.pop(0)[1]
    if (key := next((name for name in _STEP if name in header), None)) is None:
        hint = nearest("global_step", header) or "; give a CSV, with commas, that has one (or one named step)."
        raise DataError(f"log {place}: no column global_step{hint}")
    for line, row in rows:
        if len(row) != len(header):
            where = f"log {place}, line {line}"
            raise DataError(
                f"{where}: {counted(len(row), 'cell')} under {counted(len(header), 'column')}; give a cell a column."
            )
    header = _without_runs(place, header, rows)
    if "value" in header and (name := next((name for name in _NAME if name in header), None)):
        return _long(place, header, rows, name, key)
    return _wide(place, header, rows, key, timings)


def _wide(place: Path, header: list[str], rows: _Rows, key: str, timings: Sequence[str]) -> Columns:
    """Returns the scalars of a table with a column each."""
    names = _full(_of_one_run(place, header), key, timings)
    if twice := [name for name in names if name and names.count(name) > 1]:
        raise DataError(f"log {place}: two columns are named '{twice[0]}'; leave one.")
    require(timings, [name for name in names if name], f"log {place}: no column")
    columns: Columns = {name: {} for name in names if name and name != key}
    seen: dict[int, int] = {}  # step -> line
    for line, row in rows:
        cells = dict(zip(names, row, strict=True))
        step = _step(cells[key], f"log {place}, line {line}", key)
        if step in seen:
            raise DataError(
                f"log {place}, line {line}: step {step} was on line {seen[step]} already; leave one, of one run."
            )
        seen[step] = line
        for name in columns:
            cell = cells[name]
            if key == _HISTORY and not name.startswith(SECONDS) and not _is_number(cell):
                continue  # W&B's history has columns of texts and pictures, too
            if cell:
                where = f"log {place}, line {line} (step {step}), column {name}"
                columns[name][step] = number(cell, where, "a number, or nothing")
    return columns


def _long(place: Path, header: list[str], rows: _Rows, name: str, key: str) -> Columns:
    """Returns the scalars of a table with a row for each value; of a step's several values the last one counts."""
    columns: Columns = {}
    for line, row in rows:
        cells, where = dict(zip(header, row, strict=True)), f"log {place}, line {line}"
        step = _step(cells[key], where, key)
        columns.setdefault(cells[name], {})[step] = number(cells["value"], f"{where}, column value", "a number")
    return columns


def _without_runs(place: Path, header: list[str], rows: _Rows) -> list[str]:
    """Returns the columns' names, with "" for one that names the run.

    Raises:
        DataError: it names several.
    """
    names = list(header)
    for at, name in enumerate(header):
        if name.lower().replace(" ", "_") not in _RUN:
            continue
        if len(runs := sorted({row[at] for _line, row in rows})) > 1:
            raise DataError(
                f"log {place}: its column {name} has the runs '{runs[0]}' and '{runs[1]}'; leave the rows of one."
            )
        names[at] = ""
    return names


def _of_one_run(place: Path, header: list[str]) -> list[str]:
    """Returns the columns' names without a chart's names of runs; "" for a column that is no scalar's."""
    runs: dict[str, None] = {}
    names = []
    for name in header:
        run, chart, scalar = name.rpartition(" - ")
        if chart and _CHART in header:
            runs[run] = None
            name = "" if scalar.endswith(("__MIN", "__MAX")) else scalar
        names.append(name)
    if len(runs) > 1:
        first, second, *_ = runs
        raise DataError(f"log {place}: it has the runs '{first}' and '{second}'; export one of them.")
    return names


def _step(cell: str, where: str, key: str) -> int:
    at = number(cell, f"{where}, column {key}", "the step's number")
    if not (at >= 0 and at.is_integer()):
        wrong = "negative" if at < 0 else "not a whole number"
        seconds = f"; if these are seconds, name the column {SECONDS}step" if key == "step" else ""
        raise DataError(f"{where}, column {key}: step {cell} is {wrong}; give steps of 0, 1, 2 and so on{seconds}.")
    return int(at)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _full(header: Sequence[str], key: str, timings: Sequence[str]) -> list[str]:
    """Returns the columns' names, with the prefix added to known timings that lack it."""
    # Beside a column timing_s/gen, a column "reward" is more likely a score than a duration.
    bare = not any(name.startswith(SECONDS) for name in header)
    known = {name: SECONDS + name for name in _BARE if name != key and (bare or SECONDS + name in timings)}
    return [name if known.get(name) in (None, *header) else known[name] for name in header]
