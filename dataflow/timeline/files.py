"""Which files a timeline is drawn into, by the ending of their names: a picture, or a page to look around in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.errors import DataError
from dataflow.files import unwritable
from dataflow.timeline.spans import Trace

KINDS = (".html", ".png", ".svg")


def check(out: str | None, *more: str, kinds: Sequence[str] = KINDS) -> None:
    """Checks that a file can be drawn, before anything is run or written.

    Args:
        out: its name; None is none.
        more: endings that are taken beside ``kinds``.
        kinds: endings of what is drawn.

    Raises:
        DataError: another ending, or a file that cannot be written.
    """
    if out is None:
        return
    kinds = (*kinds, *more)
    path = Path(out)
    if path.suffix.lower() not in kinds:
        raise DataError(f"-o {out}: no such kind, '{path.suffix}'; give a name in {', '.join(kinds)}.")
    if (why := unwritable(path)) is not None:
        raise DataError(f"-o {out}: {why}")


def draw(
    traces: Mapping[str, Trace],
    out: str | Path,
    title: str | None = None,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Draws one run or several, as the name's ending says; see :func:`check`.

    Args:
        traces: by the names they are to have.
        out: the file; replaced in one go.
        title: of a page.
        facts: of each run, for a page: ``accuracy_before`` and ``accuracy_after``.
    """
    if Path(out).suffix.lower() == ".html":
        from dataflow.timeline.page.html import page

        page(traces, out, title, facts)
    else:
        from dataflow.timeline.picture import draw as picture

        picture(traces, out)
