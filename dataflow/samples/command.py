"""``dataflow samples``: shows the samples of a run in the terminal, as a page, as parquet or as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.section import Section, Text
from dataflow.errors import ConfigError, DataError
from dataflow.files import nearest_run, unwritable
from dataflow.samples.files import Kind, Row, file_of, plain, read, steps_in, write
from dataflow.samples.query import select
from dataflow.samples.text import listing
from dataflow.usercode.numeric import finite

KINDS = (".html", ".parquet")
_CONTROLS = re.compile("[\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that JSON allows in texts, but that change a terminal, or the order in which it shows a line."""


class SamplesQuery(Section):
    """Which samples to show."""

    step: NonNegativeInt | Literal["all"] | None = None
    """Training step, or all; null takes the newest, and for -o all."""
    val: NonNegativeInt | None = None
    """Show the evaluation of this step instead; 0 is the one before training."""
    where: Text | None = None
    """Conditions joined by and, such as: score<0.5 and explanation~"off by one"."""
    sort: Text | None = None
    """Column to sort by, such as score; -score puts the largest first."""
    most: PositiveInt = 10
    """Samples that the terminal and --json show."""


def show(run: str, overrides: Sequence[str], out: str | None, as_json: bool) -> str:
    """Returns the text that the command prints; writes ``out``.

    Args:
        run: its directory.
        overrides: keys of :class:`SamplesQuery`.
        out: a file to write instead, .html or .parquet.
        as_json: whether to return JSON.

    Raises:
        ConfigError: a bad key, condition or column.
        DataError: there is no such run or step, or a file that cannot be read or written.
    """
    query = parse_overrides(SamplesQuery, overrides)
    if query.step is not None and query.val is not None:
        raise ConfigError("step= and val= exclude each other; give one.")
    directory = _directory(run)
    _check_out(out, directory.resolve())
    kind: Kind = "step" if query.val is None else "val"
    known = steps_in(directory, kind)
    wanted = query.step if kind == "step" else query.val
    if wanted is None:
        wanted = "all" if out else known[-1] if known else 0
    if wanted != "all" and wanted not in known:
        raise ConfigError(f"{kind}={wanted}: {_said(known)}")
    steps = known if wanted == "all" else [int(wanted)]
    rows = select([row for step in steps for row in read(file_of(directory, kind, step))], query.where, query.sort)
    if out is not None:
        _write(out, rows, Path(run), kind, ordered=query.sort is not None)
        return out
    shown = rows[: query.most]
    if as_json:
        found = {"kind": kind, "steps": steps, "samples": shown, "left_out": len(rows) - len(shown)}
        return _CONTROLS.sub(lambda c: f"\\u{ord(c[0]):04x}", json.dumps(finite(found), indent=1, ensure_ascii=False))
    return listing(rows, query.most, kind, steps, query.where, query.sort)


def _said(known: Sequence[int]) -> str:
    if not known:
        return "the run kept no such samples; see its samples.every and val.every."
    listed = ", ".join(map(str, known[:8])) + (f", ... {known[-1]}" if len(known) > 8 else "")
    return f"no samples were kept of that one, only of {listed}; give one of these."


def _directory(run: str) -> Path:
    path = Path(run)
    if path.exists() and not path.is_dir():
        raise DataError(f"no run at '{run}': it is a file; give the directory of a run (runs/NAME).")
    if not path.is_dir():
        near = nearest_run(path) or "; give a run (runs/NAME)."
        raise DataError(f"no run at '{run}': there is no such directory{near}")
    if not (path / "samples").is_dir():
        raise DataError(
            f"run '{run}' has no samples: pipelines with the stages of dataflow.stages.samples keep them, with "
            "samples.every=1 from the first step on."
        )
    return path / "samples"


def _check_out(out: str | None, directory: Path) -> None:
    if out is None:
        return
    if Path(out).suffix.lower() not in KINDS:
        raise DataError(f"-o {out}: no such kind, '{Path(out).suffix}'; give a name in {' or '.join(KINDS)}.")
    if (why := unwritable(out)) is not None:
        raise DataError(f"-o {out}: {why}")
    if directory in Path(out).resolve().parents:
        raise DataError(f"-o {out}: the run keeps its samples there; give another place.")


def _write(out: str, rows: Sequence[Row], run: Path, kind: Kind, ordered: bool) -> None:
    if Path(out).suffix.lower() == ".html":
        from dataflow.samples.page import page

        page(rows, out, run.resolve().name, kind, ordered=ordered)
        return
    write(Path(out), table(rows))


def table(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Returns the columns of rows that may have different ones."""
    names: Iterable[str] = dict.fromkeys(name for row in rows for name in row)
    return {name: plain([row.get(name) for row in rows])[0] for name in names}
