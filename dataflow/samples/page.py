"""Samples as a page of groups, each with an anchor that the timeline links to: ``#step-12-group-17``.

The page is one file that loads nothing. All text from a run passes through ``html.escape``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from dataflow.drawing.page import shell
from dataflow.errors import counted
from dataflow.files import replaced
from dataflow.samples.files import Kind, Row, file_of, number, read, steps_in

LARGEST = 8_000_000
"""Approximate size of a page in characters; samples beyond it are left out, and counted."""
LINKED = 400
"""Linked groups of steps that are not on the page as a whole, at most."""
LONGEST = 4000
"""Characters of one text, at most."""
_OWN = ("step", "group", "sample", "prompt", "ground_truth", "response", "begin", "end", "data_source", "extra_info")
"""Columns that are shown elsewhere on the page, or not at all."""

_STYLE = """<style>
section.group { border-top: 1px solid var(--edge); padding: .5rem 0 .8rem; content-visibility: auto;
  contain-intrinsic-size: auto 20rem; }
section.group:target { outline: 3px solid var(--link); outline-offset: 4px; }
section.group h3 a { color: inherit; text-decoration: none; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0; font: 12.5px/1.4 ui-monospace, monospace; }
.prompt { border-left: 4px solid var(--edge); padding-left: .7rem; }
section.group p { margin: .2rem 0; }
.samples { overflow-x: auto; }
.samples td { white-space: normal; vertical-align: top; padding: .3rem .9rem .3rem 0; }
.samples td.response { min-width: 20rem; }
.samples th { cursor: pointer; }
.bar { position: sticky; top: 0; z-index: 1; display: flex; flex-wrap: wrap; gap: .3rem 1rem; align-items: baseline;
  padding: .4rem 0; background: var(--paper); border-bottom: 1px solid var(--edge); }
.bar :is(input, select) { font: inherit; }
section.group { scroll-margin-top: 3rem; }
</style>"""
_BAR = """<form class="bar" onsubmit="return false">
<label>search <input type="search" id="search" placeholder="words of any text" size="28"></label>
<label>filter <input type="search" id="where" placeholder="score&lt;0.5 and explanation~wrong" size="38"></label>
<label>sort <select id="sort"><option value="">as written</option></select></label>
<label><input type="checkbox" id="falling"> largest first</label>
<span id="count" role="status"></span>
</form>"""


def anchor(step: Any, group: Any) -> str:
    """Returns the id of a group's section on the page.

    >>> anchor(12, 17)
    'step-12-group-17'
    """
    return f"step-{step}-group-{group}"


def page(
    rows: Sequence[Row],
    path: str | os.PathLike[str],
    title: str,
    kind: Kind = "step",
    *,
    ordered: bool = False,
    first: Collection[tuple[int, int]] = (),
    note: str = "",
) -> None:
    """Writes a page of samples, each group in one section.

    Args:
        rows: the samples, of one kind.
        path: of the page; replaced atomically.
        title: of the page, such as the run's name.
        kind: of the samples.
        ordered: whether the page keeps the order of the rows; otherwise it is sorted by step and group.
        first: (step, group) of the groups to keep if there is no room for all.
        note: a further sentence for the head of the page.

    Raises:
        OSError: the page cannot be written.
    """
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["step"], row["group"]), []).append(row)
    order = list(groups) if ordered else sorted(groups)
    must = set(first)
    parts: dict[tuple[int, int], str] = {}
    size = 0
    for key in sorted(order, key=lambda key: key not in must):
        section = _group(*key, groups[key], kind)
        size += len(section)
        if size > LARGEST and parts:
            break
        parts[key] = section
    words = [_count(list(parts), kind), note]
    if left_out := len(order) - len(parts):
        words.append(f"There is no room for {left_out} more; 'dataflow samples RUN step=N' shows those of a step.")
    head = f'<h1>{escape(title)}: samples</h1>\n<p class="headline">{" ".join(words)}</p>'
    missing = '<p class="note" role="status" id="missing" hidden></p>'
    sections = ['<div id="groups">', *(parts[key] for key in order if key in parts), "</div>"]
    script = (files("dataflow.samples") / "page.js").read_text(encoding="utf-8")
    body = "\n".join([_STYLE, head, missing, _BAR, *sections])
    text = shell(f"{title}: samples", body, f"\n<script>\n{script}</script>")
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _count(keys: Sequence[tuple[int, int]], kind: Kind) -> str:
    if not keys:
        return "There are no samples."
    steps = {step for step, _ in keys}
    what = "evaluation of step" if kind == "val" else "step"
    of = f"{what} {min(steps)}" if len(steps) == 1 else f"{len(steps)} steps"
    return f"{counted(len(keys), 'group')} of {of}."


def _group(step: int, group: int, rows: Sequence[Row], kind: Kind) -> str:
    first, name = rows[0], anchor(step, group)
    scores = [value for row in rows if (value := number(row.get("score"))) is not None]
    times = [value for row in rows if (value := number(row.get("latency_s"))) is not None]
    facts = [f"scores {min(scores):.3g} to {max(scores):.3g}"] if scores else []
    facts += [f"slowest request {max(times):.2f} s"] if times else []
    if first.get("data_source"):
        facts.append(f'from <span data-name="data_source">{escape(str(first["data_source"]))}</span>')
    what = "evaluation of step" if kind == "val" else "step"
    parts = [f'<h3><a href="#{name}">{what} {step}, group {group}</a> <small>{", ".join(facts)}</small></h3>']
    if first.get("prompt") is not None:
        parts.append(f'<pre class="prompt" data-name="prompt">{_cut(first["prompt"])}</pre>')
    if first.get("ground_truth") is not None:
        truth = f'<span data-name="ground_truth">{_cut(first["ground_truth"])}</span>'
        parts.append(f"<p><small>ground truth:</small> {truth}</p>")
    columns = [c for c in dict.fromkeys(c for row in rows for c in row) if c not in _OWN]
    columns = [c for c in columns if any(row.get(c) not in (None, "", "{}", False) for row in rows)]
    body = "".join(_sample(row, columns) for row in rows)
    heads = {escape(c): escape(c.replace("_", " ")) for c in ("sample", "response", *columns)}
    cells = "".join(f'<th data-name="{column}">{words}</th>' for column, words in heads.items())
    table = f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"
    return f'<section class="group" id="{name}">{"".join(parts)}<div class="samples">{table}</div></section>'


def _sample(row: Row, columns: Sequence[str]) -> str:
    cells = "".join(map(_cell, map(row.get, columns)))
    response = f'<td class="response"><pre>{_cut(row.get("response"))}</pre></td>'
    return f"<tr><td>{row['sample']}</td>{response}{cells}</tr>"


def _cell(value: Any) -> str:
    if value is None or value != value:
        return '<td data-value="">–</td>'
    if isinstance(value, float):
        return f'<td data-value="{json.dumps(value)}">{value:.4g}</td>'
    return f"<td>{f'<pre>{_cut(value)}</pre>' if isinstance(value, str) else escape(str(value))}</td>"


def _cut(value: Any) -> str:
    text = "–" if value is None else str(value)
    cut = text if len(text) <= LONGEST else f"{text[:LONGEST]} … (+{len(text) - LONGEST})"
    return escape(cut)


def run_page(run: Path, linked: Sequence[tuple[int, int]]) -> Path | None:
    """Writes ``samples.html`` of a run, beside its timeline: its newest steps, and of the others the linked groups.

    Args:
        run: its directory.
        linked: (step, group) of the groups that the timeline links to, the most important first.

    Returns:
        The page; None if the run kept no samples of training.

    Raises:
        DataError: a file of samples cannot be read.
        OSError: the page cannot be written.
    """
    directory = run / "samples"
    left = steps_in(directory, "step")
    if not left:
        return None
    rows: list[Row] = []
    size = 0
    while left and size <= LARGEST // 2:
        found = read(file_of(directory, "step", left.pop()))
        size += sum(map(_size, found))
        rows += found
    by_step: dict[int, list[int]] = {}
    for step, group in [key for key in dict.fromkeys(linked) if key[0] in set(left)][:LINKED]:
        by_step.setdefault(step, []).append(group)
    for step, groups in by_step.items():
        rows += read(file_of(directory, "step", step), groups)
    more = ""
    if left:
        of = f"steps {left[0]} to {left[-1]}" if len(left) > 1 else f"step {left[0]}"
        more = f"Of {of} only the groups are here that the timeline links to."
    page(rows, run / "samples.html", run.resolve().name, first=linked, note=more)
    return run / "samples.html"


def _size(row: Row) -> int:
    return 300 + sum(min(len(value), LONGEST) for value in row.values() if isinstance(value, str))
