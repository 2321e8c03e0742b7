"""Draws a timeline into a file whose extension selects the kind: a picture, or an interactive page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from dataflow.errors import DataError
from dataflow.files import unwritable
from dataflow.system.extras import not_installed
from dataflow.timeline.compare import Facts
from dataflow.timeline.spans import Trace

_PICTURES = (".png", ".svg")
KINDS = (".html", *_PICTURES)


def check(out: str | None, *more: str) -> None:
    """Checks that a file can be drawn, before anything is run or written; None if no file is asked for.

    Its extension is that of a picture, of a page, or one of ``more``.
    """
    if out is None:
        return
    kinds, path = (*KINDS, *more), Path(out)
    if path.suffix.lower() not in kinds:
        raise DataError(f"-o {out}: no such kind, '{path.suffix}'; give a name in {', '.join(kinds)}.")
    missing = not_installed("matplotlib") if path.suffix.lower() in _PICTURES else None
    if (why := missing or unwritable(path)) is not None:
        raise DataError(f"-o {out}: {why}")


def title_of(run: str) -> str:
    """Returns the name of a run, given its directory, its ``trace.json``, or a trace with a name of its own."""
    path = Path(run).resolve()
    if path.is_dir():
        return path.name
    name = path.name.removesuffix(".gz").removesuffix(".json")
    return path.parent.name if name == "trace" else name


def draw(traces: Mapping[str, Trace], out: str | Path, title: str | None = None, facts: Facts | None = None) -> None:
    """Draws one run or several; the extension of ``out`` selects the kind, see :func:`check`."""
    if Path(out).suffix.lower() == ".html":
        from dataflow.timeline.page import page

        page(traces, out, title, facts)
    else:
        from dataflow.timeline.picture import draw as picture

        picture(traces, out)


def written(out: str | None) -> str:
    """Returns the line that names the picture or page just written, or "" if there is none."""
    return f"\n\n{'page' if out.lower().endswith('.html') else 'picture'}: {out}" if out else ""
