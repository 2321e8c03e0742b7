"""Reads logs with a line for each step: verl's console log, and the jsonl file of its logger ``file``."""

from __future__ import annotations

import codecs
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from dataflow.errors import DataError, counted
from dataflow.files import decoded
from dataflow.planning.sources.logs.needed import GIVE, Columns

# Ray writes the actor's name before a line, in colour.
_LINE = re.compile(r"(?:^|[\s)>\]m])step:(\d{1,12}) - (?=\S+:)")
_VALUE = re.compile(r"(?:np\.\w{1,20}\(|tensor\()?([^(),\s]{1,40})")
COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}m")
_GEN = "timing_s/gen"
"""What a run logs once in each step; a validation before the first step, or behind the last one, lacks it."""
_SAID = 3
"""New starts of a log that a sentence lists."""
HEAD = 1 << 24
"""Bytes in which the first line of a step is looked for."""


def console_text(data: bytes) -> str:
    """Decodes what a console wrote: UTF-8, or UTF-16 if its byte order mark says so, as PowerShell's ``>`` writes.

    The mark is left out, bytes that are no text are replaced, and each line ends with a line feed: a progress bar ends
    its own with a carriage return alone.
    """
    utf16 = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return data.decode("utf-16" if utf16 else "utf-8-sig", "replace").replace("\r\n", "\n").replace("\r", "\n")


def is_console(place: Path) -> bool:
    """True if a file has a line that verl's console logger writes at a step."""
    try:
        with place.open("rb") as file:
            return any(_LINE.search(line) for line in console_text(file.read(HEAD)).splitlines())
    except OSError:
        return False


def read_console(place: Path, said: list[str]) -> Columns:
    """Returns the scalars of a console log; if a resumed run logged a step twice, the later value counts.

    Args:
        place: the file.
        said: gets a sentence if steps begin again.

    Raises:
        DataError: the file cannot be read.
    """
    columns: Columns = {}
    steps: list[int] = []
    for _, line in _lines(place):
        if (found := _LINE.search(line := COLOUR.sub("", line))) is None:
            continue
        for pair in line[found.end() :].split(" - "):
            name, _, text = pair.strip().rpartition(":")
            value = _VALUE.match(text)
            if name and value and (number := _float(value[1])) is not None:
                columns.setdefault(name, {})[int(found[1])] = number
                steps += [int(found[1])] if name == _GEN else []
    said += _begun_again(steps)
    return columns


def read_jsonl(place: Path, said: list[str]) -> Columns:
    """Returns the scalars of a file with a JSON object for each step.

    An object is ``{"step": 1, "data": {"timing_s/gen": 44.8}}``, or has the scalars beside ``step`` or ``_step``.
    Values other than numbers are left out, and so is a last line that was cut off when the run ended. If a resumed run
    logged a step twice, the later value counts.

    Args:
        place: the file.
        said: gets a sentence if steps begin again.

    Raises:
        DataError: the file cannot be read, a line is no such object, or a number is too large.
    """
    columns: Columns = {}
    steps: list[int] = []
    lines = [(number, line) for number, line in _lines(place) if line.strip()]
    for at, (number, line) in enumerate(lines):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if at == len(lines) - 1:
                break
            raise DataError(
                f"log {place}, line {number} is not JSON ({str(error)[:80]}); leave it out, or {GIVE}."
            ) from error
        step, data = _of_step(row)
        if step is None:
            raise DataError(
                f'log {place}, line {number} is of no step; give objects like {{"step": 1, "data": {{...}}}}.'
            )
        steps += [step] if _GEN in data else []
        for name, value in data.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                try:
                    columns.setdefault(name, {})[step] = float(value)
                except OverflowError as error:
                    raise DataError(
                        f"log {place}, line {number}: {name} is over {sys.float_info.max:.0e}; leave it out, or {GIVE}."
                    ) from error
    said += _begun_again(steps)
    return columns


def _begun_again(steps: Sequence[int]) -> list[str]:
    """Returns the sentence on where steps, in the order of the lines, begin again; [] if they only ascend."""
    again = [f"at step {step} after step {before}" for before, step in pairwise(steps) if step <= before]
    if not again:
        return []
    more = f" and {counted(len(again) - _SAID, 'more time')}" if len(again) > _SAID else ""
    return [
        f"the log starts again {', '.join(again[:_SAID])}{more}: the later lines were taken for a step that it has "
        "twice, as of a run that was resumed (if they are of another run, leave the lines of one)."
    ]


def _of_step(row: Any) -> tuple[int | None, dict[str, Any]]:
    """Returns the step of a row and what it has logged; None if it is of no step."""
    if not isinstance(row, dict):
        return None, {}
    data = row.get("data", row)
    step = row.get("step", row.get("_step"))
    if isinstance(step, bool) or not isinstance(step, int | float) or not (0 <= step < math.inf and step == int(step)):
        return None, {}
    return int(step), data if isinstance(data, dict) else {}


def _lines(place: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines of a file with their numbers."""
    try:
        text = decoded(place.read_bytes()) if place.suffix == ".jsonl" else console_text(place.read_bytes())
    except OSError as error:
        raise DataError(f"log {place}: {error.strerror or error}; {GIVE}.") from error
    except ValueError as error:
        raise DataError(f"log {place} is not text ({error}); {GIVE}.") from error
    yield from enumerate(text.split("\n"), 1)


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
