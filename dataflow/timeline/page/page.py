"""The timeline as an interactive page: one HTML file that loads nothing and opens offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from dataflow.drawing.page import embedded, shell
from dataflow.errors import DataError
from dataflow.files import replaced
from dataflow.timeline.causes.attribution import summary
from dataflow.timeline.compare import Facts
from dataflow.timeline.page import tables
from dataflow.timeline.page.chart import chart
from dataflow.timeline.spans import Trace
from dataflow.timeline.text import named


def page(
    traces: Mapping[str, Trace] | Trace,
    path: str | os.PathLike[str],
    title: str | None = None,
    facts: Facts | None = None,
) -> None:
    """Writes a page of one run, or of several below each other on one time axis.

    Args:
        traces: one run, or several by name; the others are compared with the first.
        path: file name ending in ``.html``, replaced atomically. The same traces give the same file.
        title: over the whole page; the names of the runs by default.
        facts: of each run.

    Raises:
        DataError: the file name has another ending, or a trace has no task.
    """
    if Path(path).suffix.lower() != ".html":
        raise DataError(f"page {path}: no such kind, '{Path(path).suffix}'; give a name in .html.")
    made = text(named(traces, f"page {path}"), title, facts or {})
    with replaced(path) as temporary:
        temporary.write_text(made, encoding="utf-8")


def text(traces: Mapping[str, Trace], title: str | None, facts: Facts) -> str:
    """Returns the page as HTML; arguments as of :func:`page`, each trace with at least one task."""
    drawn = chart(traces, {name: str(of["samples"]) for name, of in facts.items() if "samples" in of})
    numbers = {name: summary(trace) for name, trace in traces.items()}
    several = len(traces) > 1
    *others, last = traces
    title = title or (f"{', '.join(others)} and {last}" if others else last)
    top = [tables.warnings(trace, name if several else "") for name, trace in traces.items()]
    below: list[str] = []
    for name, trace in traces.items():
        headline = tables.headline(trace, numbers[name])
        (below if several else top).append((f"<h2>{escape(name)}</h2>" if several else "") + headline)
        below.append(tables.cards(trace, numbers[name], facts.get(name, {})))
    if several:
        top.append(tables.comparison(traces, facts))
    body = Template(_asset("page.html")).substitute(
        title=escape(title), top="\n".join(top), legend=tables.legend(drawn["causes"]), below="\n".join(below),
        data=embedded("data", drawn), script=_asset("page.js"),
    )  # fmt: skip
    return shell(title, body)


def _asset(name: str) -> str:
    return (files("dataflow.timeline.page") / name).read_text(encoding="utf-8")
