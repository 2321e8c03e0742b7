"""What the pages of the timeline, the plan and the samples share: shell, tables, embedded data.

A page is one HTML file that loads nothing, so that it opens offline.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any


def shell(title: str, body: str) -> str:
    """Returns a whole page with the HTML of its body; the title, of the browser's tab, is escaped here."""
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
{body}
</body>
</html>
"""


def card(title: str, body: str, kind: str = "") -> str:
    """Returns a box of a heading, as text, and a body, as HTML; "" if the body is empty."""
    return f'<div class="card {kind}"><h3>{escape(title)}</h3>{body}</div>' if body else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]], looks: Sequence[str] = ()) -> str:
    """Returns a table, in a box in which it scrolls where the page is too narrow for it.

    The cells are HTML; an empty ``head`` gives none. ``looks`` is a class for each row, or "".
    """
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr{f' class={look}' if look else ''}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>"
        for row, look in zip(rows, looks or [""] * len(rows), strict=True)
    )
    whole = f"<table>{f'<thead><tr>{top}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
    return f'<div class="scroll">{whole}</div>'


def embedded(name: str, value: Any) -> str:
    """Returns an element that holds JSON data; no text in the data can end the element."""
    words = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{words}</script>'
