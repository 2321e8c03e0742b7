"""The text of a plan's page: its table above the drawing, what it assumes, its advice and sweeps below. Pure.

All text of a plan passes through ``html.escape``.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from dataflow.planning.plan import Plan

Words: TypeAlias = tuple[str, str]
"""HTML above a drawing, and below it."""


def words(plan: Plan) -> Words:
    """Returns the text of a plan's page."""
    from dataflow.planning.plan import AS_LOGGED, sweep_cells, sweep_title

    load = plan.workload
    above = f'<p class="note" role="status">{_sentence(load.caution)}</p>' if load.caution else ""
    above += f'<p class="headline">{escape(plan.size())}.</p>'
    if lines := [_sentence(line[:1].upper() + line[1:]) for said in plan.trust() for line in said.split("\n")]:
        above += f'<p class="headline">{"<br>".join(lines)}</p>'
    head, *rows = plan.cells()
    best = min(plan.rows, key=lambda row: row.step_s).policy
    looks = ["logged" if row[0] == AS_LOGGED else "best" if row[0] == best else "" for row in rows]
    above += f'<section class="compared">{_table(head, rows, looks)}</section>'
    cards = [_list("advice", plan.advice), _list("assumed", load.assumptions)]
    for sweep in plan.sweeps:
        first, *following = sweep_cells(sweep)
        cards.append(_card(sweep_title(sweep), _table(first, following)))
    return above, f'<section class="panel">{"".join(cards)}</section>'


def _sentence(text: str) -> str:
    return escape(text if text.endswith(".") else f"{text}.")


def _list(title: str, sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    return _card(title, f"<ul>{''.join(f'<li>{_sentence(said)}</li>' for said in sentences)}</ul>")


def _card(title: str, body: str) -> str:
    return f'<div class="card"><h3>{escape(title)}</h3>{body}</div>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], looks: Sequence[str] = ()) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr{f' class={look}' if look else ''}>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
        for row, look in zip(rows, looks or [""] * len(rows), strict=True)
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
