"""Samples in the terminal: a header line, and below it the shortened texts of each sample. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from dataflow.errors import counted
from dataflow.samples.files import Kind, Row, number

WIDE = 100
"""Columns of a line, at most."""
LINES = 4
"""Lines of one text, at most."""
_TEXTS = ("prompt", "response", "explanation", "query", "ground_truth")
"""Columns shown as text, in this order."""
_HEAD = ("step", "group", "sample", "weights_version", "data_source", "extra_info", "begin", "end")
"""Columns that the header or the heading shows already, or that are of no use to a reader."""


def listing(
    rows: Sequence[Row], most: int, kind: Kind, steps: Sequence[int], where: str | None, sort: str | None
) -> str:
    """Returns samples as lines of at most :data:`WIDE` columns, ending with what is left out.

    Args:
        rows: selected and sorted.
        most: samples to show.
        kind: of samples.
        steps: that were searched.
        where, sort: as they were given.
    """
    what = "step" if kind == "step" else "evaluation after step"
    of = f"{what} {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps"
    groups = len({(row["step"], row["group"]) for row in rows})
    words = [f"{of}: {counted(len(rows), 'sample')} in {counted(groups, 'group')}"]
    scores = [value for row in rows if (value := number(row.get("score"))) is not None]
    if scores:
        words.append(f"mean score {sum(scores) / len(scores):.3f}")
    words += [f"where {where}"] if where else []
    words += [f"sort={sort}"] if sort else []
    lines = [_clean(", ".join(words))]
    for row in rows[:most]:
        lines += ["", *_sample(row, len(steps) > 1)]
    if (left := len(rows) - most) > 0:
        lines += ["", f"... {left} more; most={len(rows)} shows all, -o samples.html makes a page of them"]
    return "\n".join(line for text in lines for line in (_wrapped(text, "", 20) if len(text) > WIDE else [text]))


def _sample(row: Row, with_step: bool) -> list[str]:
    head = [f"step {row['step']}"] if with_step else []
    head += [f"group {row['group']}", f"sample {row['sample']}"]
    rest = {name: value for name, value in row.items() if name not in (*_TEXTS, *_HEAD) and value is not None}
    if (version := row.get("weights_version")) is not None:
        rest["weights"] = version
    facts = [f"{name} {_short(value)}" for name, value in rest.items() if _worth(name, value)]
    lines = _wrapped("  ".join([*head, *facts]), "", 3)
    for name in _TEXTS:
        if row.get(name) is not None:
            label = f"  {name.replace('_', ' '):<12} "
            lines += _wrapped(str(row[name]), label, LINES)
    return lines


def _worth(name: str, value: Any) -> bool:
    """Whether a fact is worth showing, since it is not the usual one."""
    usual = {"tries": 1, "truncated": False, "finish_reason": "stop", "kept": True}
    return not (name in usual and value == usual[name]) and value not in ("", "{}", "[]")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = _clean(str(value))
    return text if len(text) <= 60 else f"{text[:59]}…"


def _clean(text: str) -> str:
    """Returns a text as one line that cannot change the terminal."""
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def _wrapped(text: str, label: str, lines: int) -> list[str]:
    """Returns a text in lines, the first after a label; the last one ends with the amount left out."""
    room = WIDE - len(label)
    # No more than can be shown is wrapped: a text may have a million characters.
    whole = _clean(text[: 4 * room * lines])
    found = textwrap.wrap(whole, room, break_on_hyphens=False) or [""]
    if len(found) > lines or len(text) > 4 * room * lines:
        found = found[:lines]
        seen = sum(map(len, found)) + len(found) - 1
        note = f"… (+{max(1, len(text) - seen)})"
        found[-1] = f"{found[-1][: room - len(note) - 1]} {note}"
    return [(label if i == 0 else " " * len(label)) + line for i, line in enumerate(found)]
