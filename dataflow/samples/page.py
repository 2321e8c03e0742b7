"""Samples as a page: a table that sorts, filters and searches, to which the timeline links as ``#step-12-group-17``.

The page is one file that loads nothing. Its script writes the texts of a run as text, never as HTML.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from typing import Any

from dataflow.drawing.page import embedded, shell
from dataflow.errors import counted
from dataflow.files import replaced
from dataflow.samples.files import Kind, Row, file_of, read, steps_in

LARGEST = 8_000_000
"""Approximate size of a page in characters; samples beyond it are left out, and counted."""
_LINKED = 400
"""Linked groups of steps that are not on the page as a whole, at most."""
_LONGEST = 4000
"""Characters of one text, at most."""

_BODY = """<style>
.bar { display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: baseline; margin-bottom: .4rem; }
th { cursor: pointer; white-space: nowrap; }
th[aria-sort=ascending]::after { content: " ▲"; } th[aria-sort=descending]::after { content: " ▼"; }
thead input { font: inherit; width: 3.6rem; box-sizing: border-box; } thead input.text { width: 100%; }
tbody tr.sample { cursor: pointer; } tbody tr.sample:hover { background: var(--tint); }
td.text { max-width: 16rem; min-width: 9rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
tr.whole td { white-space: normal; border-left: 4px solid var(--edge); padding: .3rem .8rem .8rem; }
dt { color: var(--faint); font-size: .88em; margin-top: .4rem; }
dl { margin: 0; position: sticky; left: 0; max-width: min(70rem, 92vw); }
dd { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: 12.5px/1.4 ui-monospace, monospace; }
</style>
<form class="bar" onsubmit="return false">
<label>search <input type="search" id="search" placeholder="words of any text" size="40"></label>
<button type="reset">clear</button> <span id="count" role="status"></span>
</form>
<div class="scroll"><table><thead id="head"></thead><tbody id="rows"></tbody></table></div>
<p class="hint">A name sorts; a row opens. A box under a name keeps what contains its words, or with <kbd>&lt;</kbd>
<kbd>&lt;=</kbd> <kbd>&gt;</kbd> <kbd>&gt;=</kbd> <kbd>=</kbd> <kbd>!=</kbd> before it compares, such as &lt;0.5.</p>"""


def page(rows: Sequence[Row], path: Path, title: str, kind: Kind = "step", note: str = "") -> None:
    """Writes a page of samples of one kind, in their order; of too many for a page, the first ones are shown.

    The page is replaced atomically. ``note`` is a further sentence for its head.
    """
    sizes = accumulate(map(_size, rows))
    shown = [row for at, (row, size) in enumerate(zip(rows, sizes, strict=True)) if size <= LARGEST or not at]
    what = "evaluations" if kind == "val" else "training"
    words = [f"{counted(len(shown), 'sample')} of {what}, {counted(len({r['step'] for r in shown}), 'step')}.", note]
    if left_out := len(rows) - len(shown):
        words.append(f"There is no room for {left_out} more; 'dataflow samples RUN step=N' shows those of a step.")
    columns = dict.fromkeys(name for row in shown for name in row if name not in ("begin", "end"))
    used = [name for name in columns if any(row.get(name) not in (None, "", "{}") for row in shown)]
    data = {"columns": used, "rows": [[_value(row.get(name)) for name in used] for row in shown]}
    head = f'<h1>{escape(title)}: samples</h1>\n<p class="headline">{" ".join(words)}</p>'
    script = (files("dataflow.samples") / "page.js").read_text(encoding="utf-8")
    scripts = f"\n{embedded('samples', data)}\n<script>\n{script}</script>"
    with replaced(path) as temporary:
        temporary.write_text(shell(f"{title}: samples", f"{head}\n{_BODY}{scripts}"), encoding="utf-8")


def run_page(run: Path, linked: Sequence[tuple[int, int]]) -> Path | None:
    """Writes ``samples.html`` of a run, beside its timeline: its newest steps, and of the others the linked groups.

    Args:
        linked: (step, group) of the groups that the timeline links to, the most important first.

    Returns:
        The page; None if the run kept no samples of training.

    Raises:
        DataError, OSError: a file of samples cannot be read, or the page cannot be written.
    """
    directory = run / "samples"
    left = steps_in(directory, "step")
    if not left:
        return None
    wanted, rows = set(linked[:_LINKED]), list[Row]()
    while left and sum(map(_size, rows)) <= LARGEST // 2:
        rows[:0] = read(file_of(directory, "step", left.pop()))
    for step in sorted({step for step, _group in wanted}.intersection(left), reverse=True):
        rows[:0] = read(file_of(directory, "step", step), [group for of, group in wanted if of == step])
    rows.sort(key=lambda row: (row["step"], row["group"]) not in wanted)  # first what has to be there
    note = "" if not left else f"Of the steps up to {left[-1]} only the groups are here that the timeline links to."
    page(rows, run / "samples.html", run.resolve().name, note=note)
    return run / "samples.html"


def _value(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST:
        return f"{value[:_LONGEST]} … (+{len(value) - _LONGEST})"
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _size(row: Row) -> int:
    return 300 + sum(min(len(value), _LONGEST) for value in row.values() if isinstance(value, str))
