"""The text of a plan's page: its table above the drawing, what it assumes, its advice and sweeps below. Pure.

All text of a plan passes through ``html.escape``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from dataflow.drawing.page import card, table

Table = Sequence[Sequence[str]]
"""Rows of cells, the first of which is the head."""


@dataclass(frozen=True)
class Words:
    """What a plan says.

    Attributes:
        caution: what to know first; "" for nothing.
        lines: what is planned, and how far it is off the log.
        table: of the policies.
        looks: row -> ``best`` or ``logged``, by its first cell.
        lists: title -> sentences.
        sweeps: title -> table.
    """

    caution: str
    lines: Sequence[str]
    table: Table
    looks: dict[str, str]
    lists: dict[str, Sequence[str]]
    sweeps: dict[str, Table]

    def above(self) -> str:
        """Returns the HTML above the drawing."""
        note = f'<p class="note" role="status">{_sentence(self.caution)}</p>' if self.caution else ""
        shown = "<br>".join(_sentence(line[:1].upper() + line[1:]) for line in self.lines)
        policies = _table(self.table, self.looks)
        return f'{note}<p class="headline">{shown}</p><section class="compared">{policies}</section>'

    def below(self) -> str:
        """Returns the HTML below the drawing."""
        cards = [
            card(title, f"<ul>{''.join(f'<li>{_sentence(shown)}</li>' for shown in sentences)}</ul>")
            for title, sentences in self.lists.items()
            if sentences
        ]
        cards += [card(title, _table(cells, {})) for title, cells in self.sweeps.items()]
        return f'<section class="panel halves">{"".join(cards)}</section>'


def _sentence(text: str) -> str:
    return escape(text if text.endswith(".") else f"{text}.")


def _table(cells: Table, looks: dict[str, str]) -> str:
    head, *rows = ([escape(cell) for cell in row] for row in cells)
    return table(head, rows, [looks.get(row[0], "") for row in cells[1:]])
