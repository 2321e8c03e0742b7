"""What the interactive pages of the timeline and the plan share: shell, embedded data, bokeh's scripts, light and dark.

A page is one HTML file that loads nothing, so that it opens offline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import count
from typing import Any

# Colours of what a page draws, as (light, dark).
INK, FAINT, LINE = ("#222222", "#E4E4E4"), ("#666666", "#A2A2A2"), ("#DDDDDD", "#3A3A3A")

BUTTONS = """
.bk-btn-group { flex-wrap: wrap; gap: 4px; }
.bk-btn-group .bk-btn {
  border: 1px solid var(--edge, #c8c8c8) !important; border-radius: 4px !important; padding: 3px 9px 3px 7px;
  background: transparent !important; color: var(--ink, #222) !important; font: 12.5px system-ui, sans-serif;
  box-shadow: none !important; margin: 0 !important; flex: none;
}
.bk-btn-group .bk-btn:not(.bk-active) { opacity: 0.5; text-decoration: line-through; }
.bk-btn-group .bk-btn:focus-visible { outline: 2px solid #0072B2; }
.bk-btn::before {
  content: ""; display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 6px;
  vertical-align: -1px;
}
"""
"""Style sheet of a group of switches, each with a coloured mark."""

TOOLS = """
.bk-OnOffButton { border-color: transparent; border-radius: 4px; }
.bk-OnOffButton.bk-active { border-color: transparent; background-color: rgb(0 114 178 / .18); }
"""
"""Style sheet of a chart's tools: bokeh marks those in use by a line, which looks as if it belonged to the chart."""

QUIET_FOCUS = """
// Bokeh frames a chart or a tool that is clicked; the frame is kept for those who come by keyboard.
function quietFocus(place) {
  const sheet = new CSSStyleSheet()
  sheet.replaceSync(".bk-events:focus:not(:focus-visible), :host(:focus:not(:focus-visible)) { outline: none }")
  const walk = (element) => {
    if (element.shadowRoot) element.shadowRoot.adoptedStyleSheets.push(sheet)
    for (const below of [...(element.shadowRoot?.children ?? []), ...element.children]) walk(below)
  }
  walk(place)
}
"""
"""Script with the function ``quietFocus(element)``, for an element that holds charts."""


def shell(title: str, body: str, scripts: str = "") -> str:
    """Returns a whole page.

    Args:
        title: of the browser's tab; escaped here.
        body: HTML.
        scripts: ``<script>`` elements, after the body.
    """
    style = (files("dataflow.drawing") / "page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
{body}{scripts}
</body>
</html>
"""


def card(title: str, body: str, kind: str = "") -> str:
    """Returns a box with a heading; "" if it is empty.

    Args:
        title: text.
        body: HTML.
        kind: further classes of the element.
    """
    return f'<div class="card {kind}"><h3>{escape(title)}</h3>{body}</div>' if body else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], looks: Sequence[str] = ()) -> str:
    """Returns a table, in a box in which it scrolls where the page is too narrow for it.

    Args:
        head: HTML of the cells above the columns; none if empty.
        rows: HTML of the cells.
        looks: a class for each row, or "".
    """
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr{f' class={look}' if look else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for row, look in zip(rows, looks or [""] * len(rows), strict=True)
    )
    whole = f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
    return f'<div class="scroll">{whole}</div>'


def bokeh_scripts() -> str:
    """Returns bokeh's own scripts as ``<script>`` elements, so that the page need not load them."""
    from bokeh.resources import Resources

    scripts = Resources(mode="inline", components=["bokeh", "bokeh-widgets"]).js_raw
    return "\n".join(f"<script>\n{script}\n</script>" for script in scripts)


def embedded(name: str, value: Any) -> str:
    """Returns an element that holds JSON data; no text in the data can end the element."""
    words = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{words}</script>'


def read_embedded(name: str) -> str:
    """Returns the JavaScript expression that reads the data of :func:`embedded`."""
    return f'JSON.parse(document.getElementById("{name}").textContent)'


def renumbered(item: Any) -> Any:
    """Returns a bokeh item with ids counted from 1, so that the same page gives the same file.

    Bokeh's own ids count on from one page of a process to the next.
    """
    numbers = count(1)
    known: dict[str, str] = {}

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: _number(v) if k in ("id", "root_id") and isinstance(v, str) else walk(v)
                    for k, v in value.items()}  # fmt: skip
        return [walk(v) for v in value] if isinstance(value, list | tuple) else value

    def _number(old: str) -> str:
        if old not in known:
            known[old] = f"p{next(numbers)}"
        return known[old]

    return walk(item)
