"""``dataflow samples``: shows the samples of a run in the terminal, as a page, as parquet or as JSON."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.section import Section, Text
from dataflow.errors import ConfigError, DataError, counted, nearest
from dataflow.files import unwritable
from dataflow.samples.files import Kind, Row, file_of, read, steps_in, write
from dataflow.samples.page import page

_KINDS = (".html", ".parquet")
_WIDE, _LINES = 100, 4
"""Columns of a line in the terminal, and lines of one text, at most."""
_TEXTS = ("prompt", "response", "explanation", "query", "ground_truth")
"""Columns shown as text, in this order."""
_HEAD = ("step", "group", "sample", "data_source", "extra_info", "begin", "end")
"""Columns that the heading shows already, or that are of no use to a reader."""
_USUAL = {"tries": 1, "truncated": False, "finish_reason": "stop", "kept": True}


class SamplesQuery(Section):
    """Which samples to show."""

    step: NonNegativeInt | Literal["all"] | None = None
    """Training step, or all; null takes the newest, and for -o all."""
    val: NonNegativeInt | None = None
    """Show the evaluation of this step instead; 0 is the one before training."""
    where: Text | None = None
    """A condition as pandas' DataFrame.query takes it: score < 0.5 and explanation.str.contains("off by one")."""
    sort: Text | None = None
    """Column to sort by, such as score; -score puts the largest first."""
    most: PositiveInt = 10
    """Samples that the terminal and --json show."""


def show(run: str, overrides: Sequence[str], out: str | None, as_json: bool) -> str:
    """Returns the text that the command prints, or writes ``out``, an .html or .parquet file.

    The overrides are keys of :class:`SamplesQuery`.
    """
    query, directory = parse_overrides(SamplesQuery, overrides), Path(run, "samples")
    if query.step is not None and query.val is not None:
        raise ConfigError("step= and val= exclude each other; give one.")
    if not Path(run).is_dir():
        raise DataError(f"no run at '{run}'; give the directory of a run (runs/NAME).")
    if not directory.is_dir():
        raise DataError(
            f"run '{run}' has no samples: the stages of dataflow.stages.samples keep them when a step ends, with "
            "samples.every=1 from the first on; requests of a step that failed are in its rewards.sqlite."
        )
    if out is not None and Path(out).suffix.lower() not in _KINDS:
        raise DataError(f"-o {out}: no such kind, '{Path(out).suffix}'; give a name in {' or '.join(_KINDS)}.")
    if out is not None and (why := unwritable(out)) is not None:
        raise DataError(f"-o {out}: {why}")
    kind: Kind = "step" if query.val is None else "val"
    known = steps_in(directory, kind)
    wanted = query.step if query.val is None else query.val
    if wanted is None:
        wanted = "all" if out or not known else known[-1]
    if not known or (wanted != "all" and wanted not in known):
        kept = f"only of {', '.join(map(str, known[:8]))}{', ...' * (len(known) > 8)}" if known else "none at all"
        raise ConfigError(f"{kind}={wanted}: no samples were kept of that one, {kept} (samples.every, val.every).")
    steps = known if wanted == "all" else [int(wanted)]
    rows = select([row for step in steps for row in read(file_of(directory, kind, step))], query.where, query.sort)
    if out is not None and Path(out).suffix.lower() == ".html":
        page(rows, Path(out), Path(run).resolve().name, kind)
    elif out is not None:
        names = dict.fromkeys(name for row in rows for name in row)
        write(Path(out), {name: [row[name] for row in rows] for name in names})
    if out is not None:
        return out
    if as_json:
        shown = rows[: query.most]
        return json.dumps(
            {"kind": kind, "steps": steps, "samples": shown, "left_out": len(rows) - len(shown)}, indent=1
        )
    what = "step" if kind == "step" else "evaluation after step"
    return "\n".join(_listing(rows, query.most, f"{what} {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps"))


def select(rows: Sequence[Row], where: str | None, sort: str | None) -> list[Row]:
    """Returns the rows that meet a condition, sorted; all have the same columns, with None where one has no value.

    Args:
        where: an expression of pandas' ``DataFrame.query``; None for all rows.
        sort: column to sort by, smallest first, with ``-`` before it largest first; rows without a value come last,
            equal ones stay in order. Its unit may be left out (``latency``). None leaves the order.
    """
    import pandas

    # Each column keeps its type beside missing values: numbers of 64 bits, truth values, texts.
    frame = pandas.DataFrame(rows).convert_dtypes()
    names = ", ".join(map(str, frame.columns))
    if where and rows:
        try:
            frame = frame.query(where, engine="python")
        except Exception as error:  # of Python, of pandas or of its parser: whatever the expression raises
            raise ConfigError(
                f"where: '{where}' is no condition on samples ({' '.join(str(error).split())}); write it for pandas' "
                f"DataFrame.query, such as score < 0.5 and kept; the samples have {names}."
            ) from error
    if sort and rows:
        name = sort.removeprefix("-")
        if name not in frame and (name := f"{name}_s") not in frame:
            hint = nearest(sort.removeprefix("-"), frame.columns) or ";"
            raise ConfigError(f"sort: no column '{sort.removeprefix('-')}'{hint} the samples have {names}.")
        frame = frame.sort_values(name, ascending=not sort.startswith("-"), kind="stable")
    # JSON lacks what is missing, and infinite numbers.
    frame = frame.astype(object).where(frame.notna(), None).replace([math.inf, -math.inf], None)
    found: list[Row] = frame.to_dict("records")
    return found


def _listing(rows: Sequence[Row], most: int, of: str) -> list[str]:
    """Returns samples as lines of at most :data:`_WIDE` columns, ending with what is left out."""
    groups = len({(row["step"], row["group"]) for row in rows})
    head = f"{of}: {counted(len(rows), 'sample')} in {counted(groups, 'group')}"
    scores = [row["score"] for row in rows if row.get("score") is not None]
    lines = [f"{head}, mean score {sum(scores) / len(scores):.3f}" if scores else head]
    for row in rows[:most]:
        facts = [f"{name} {row[name]}" for name in ("step", "group", "sample")]
        facts += [
            f"{name} {f'{value:.4g}' if isinstance(value, float) else str(value)[:60]}"
            for name, value in row.items()
            if name not in (*_TEXTS, *_HEAD) and value not in (None, "", "{}", "[]") and _USUAL.get(name) != value
        ]
        lines += ["", *_wrapped("  ".join(facts), "")]
        for name in _TEXTS:
            if row.get(name) is not None:
                lines += _wrapped(str(row[name]), f"  {name.replace('_', ' '):<12} ")
    if (left := len(rows) - most) > 0:
        lines += ["", f"... {left} more; most={len(rows)} shows all, -o samples.html makes a page of them"]
    return lines


def _wrapped(text: str, label: str) -> list[str]:
    """Returns a text in lines, the first after a label, without characters that would change the terminal."""
    # No more than can be shown is wrapped: a text may have a million characters.
    clean = "".join(c if c.isprintable() else "�" for c in " ".join(text[: 2 * _WIDE * _LINES].split()))
    blank = " " * len(label)
    return textwrap.wrap(
        clean or "-", _WIDE, initial_indent=label, subsequent_indent=blank, max_lines=_LINES, placeholder=" …"
    )
