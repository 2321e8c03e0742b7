"""The timeline as an interactive page: one HTML file that loads nothing and opens offline."""

from __future__ import annotations

import os
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from dataflow.drawing.page import QUIET_FOCUS, bokeh_scripts, embedded, read_embedded, renumbered, shell
from dataflow.drawing.style import colours
from dataflow.errors import DataError
from dataflow.files import replaced
from dataflow.timeline.causes.attribution import summary
from dataflow.timeline.page import panel
from dataflow.timeline.page.chart import chart, script_facts
from dataflow.timeline.page.tracks import sheet
from dataflow.timeline.spans import Trace, looks
from dataflow.timeline.text import named

_HINT = (
    "Point at anything for its facts. The wheel zooms, dragging moves; the bar below the chart is the whole run, "
    "and its window can be dragged. A button switches a stage or a layer off. "
    '<button type="button" class="act" id="help">Keys: <kbd>?</kbd></button>'
)
_KEYS = (
    ("W S", "zoom in and out, at the pointer"),
    ("A D ← →", "move left and right"),
    ("0", "the whole run"),
    ("Tab", "to the switches, the steps and the chart's tools; Space presses a switch"),
    ("?", "this list; Escape closes it"),
)
Facts = Mapping[str, Mapping[str, Any]]


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
        facts: run -> facts that its trace does not contain: its evaluations (``score_after``), and
            ``samples``, the address of the page of its samples.

    Raises:
        DataError: the file name has another ending, or a trace has no task.
    """
    target = Path(path)
    if target.suffix.lower() != ".html":
        raise DataError(f"page {path}: no such kind, '{target.suffix}'; give a name in .html.")
    made = text(named(traces, f"page {path}"), title, facts)
    with replaced(target) as temporary:
        temporary.write_text(made, encoding="utf-8")


def text(traces: Mapping[str, Trace], title: str | None = None, facts: Facts | None = None) -> str:
    """Returns the page as HTML.

    Args:
        traces: by name, each with at least one task.
        title, facts: see :func:`page`.
    """
    from bokeh.embed import json_item

    facts = facts or {}
    drawn = sheet(traces)
    colour = colours(*looks(traces.values()))
    item: Any = renumbered(json_item(chart(drawn, colour)))
    numbers = {name: summary(trace) for name, trace in traces.items()}
    several = len(traces) > 1
    *others, last = traces
    title = title or (f"{', '.join(others)} and {last}" if others else last)
    parts = [f"<h1>{escape(title)}</h1>"]
    for name, trace in traces.items():
        parts.append(_named(panel.notes(trace), name if several else ""))
    if several:
        parts.append(panel.compared(traces, numbers, facts))
    else:
        parts += [panel.headline(trace, numbers[name]) for name, trace in traces.items()]
    parts.append(f'<div id="timeline"></div>{panel.legend(drawn.causes)}<p class="hint">{_HINT}</p>{_dialog()}')
    for name, trace in traces.items():
        found = panel.panel(trace, numbers[name], facts.get(name, {}))
        parts.append(f"<h2>{escape(name)}</h2>{panel.headline(trace, numbers[name])}{found}" if several else found)
    samples = {name: str(of["samples"]) for name, of in facts.items() if "samples" in of}
    data = f"{embedded('item', item)}\n{embedded('facts', script_facts(drawn, colour, samples))}"
    start = f"timeline.start({read_embedded('item')}, {read_embedded('facts')})"
    scripts = f"{bokeh_scripts()}\n<script>{QUIET_FOCUS}</script>\n<script>\n{_asset('page.js')}{start}\n</script>"
    return shell(title, "\n".join(parts) + f"\n{data}\n{scripts}")


def _dialog() -> str:
    rows = "".join(
        f"<tr><td>{' '.join(f'<kbd>{key}</kbd>' for key in keys.split())}</td><td>{what}</td></tr>"
        for keys, what in _KEYS
    )
    close = '<form method="dialog"><button class="act">close</button></form>'
    return f'<dialog id="keys" aria-label="keys"><h3>Keys</h3><table>{rows}</table>{close}</dialog>'


def _named(note: str, name: str) -> str:
    return note.replace('role="status">', f'role="status"><b>{escape(name)}:</b> ') if name else note


def _asset(name: str) -> str:
    return (files("dataflow.timeline.page") / name).read_text(encoding="utf-8")
