"""The plan as a picture, or as a page around it: what each policy's step consists of, and its time over each knob."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dataflow.drawing.duration import figure as digits
from dataflow.drawing.page import card, shell, table
from dataflow.drawing.style import HATCHED, INK, WIDTH, cause_colours, columns_that_fit, save
from dataflow.errors import DataError
from dataflow.files import replaced
from dataflow.planning.planner import Prediction, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".html")
AS_LOGGED = "as logged"
"""The row of the source's own run, replayed."""
# Okabe and Ito's colours, and matplotlib's markers.
_POLICIES = {
    "baseline": ("#D55E00", "o"),
    "mini-batch": ("#E69F00", "s"),
    "off-policy": ("#56B4E9", "D"),
    "both": ("#0072B2", "^"),
    "both+stream": ("#009E73", "P"),
}
_EXTRA = (("#CC79A7", "v"), ("#8C6D1F", "X"), ("#6A51A3", "p"), ("#B0413E", "<"))
_GPU = "#5F7A8A"
_HATCHES = ("////", "\\\\\\\\", "....", "xxxx", "----", "||||")
_DASHED = (0, (3, 2))
_SEEN = 0.004
"""Share of the longest bar; less is too small to see."""
_KNOBS = {
    "reward.concurrency": "reward requests in flight at most",
    "reward.rpm": "reward requests a minute at most",
    "mini_batches": "mini-batches (optimizer steps) a step",
}
Table = Sequence[Sequence[str]]
"""Rows of cells, the first of which is the head."""


@dataclass(frozen=True)
class Words:
    """What a plan says, around the picture of a page.

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

    def around(self, drawing: str) -> str:
        """Returns the HTML of the words around that of a drawing."""
        note = f'<p class="note" role="status">{_sentence(self.caution)}</p>' if self.caution else ""
        shown = "<br>".join(_sentence(line[:1].upper() + line[1:]) for line in self.lines)
        policies = _table(self.table, self.looks)
        lists = {title: "".join(f"<li>{_sentence(each)}</li>" for each in said) for title, said in self.lists.items()}
        cards = [card(title, f"<ul>{items}</ul>") for title, items in lists.items() if items]
        cards += [card(title, _table(cells, {})) for title, cells in self.sweeps.items()]
        return (
            f'{note}<p class="headline">{shown}</p><section class="compared">{policies}</section>{drawing}'
            f'<section class="panel halves">{"".join(cards)}</section>'
        )


def draw_plan(
    rows: Sequence[Prediction],
    sweeps: Sequence[Sweep],
    path: str | os.PathLike[str],
    title: str = "",
    words: Words | None = None,
) -> None:
    """Draws a plan into a file: a bar for each policy, then a panel for each sweep.

    Args:
        rows: a prediction for each policy.
        sweeps: predictions over the values of knobs; may be empty.
        path: file name, ending in ``.png`` (1400 pixels wide), ``.svg`` or ``.html`` (one file that opens offline);
            an existing file is replaced atomically.
        title: over the whole drawing; none if empty.
        words: the text of a page, around the drawing; none by default.

    Raises:
        DataError: the file name has another ending.
    """
    target = Path(path)
    kind = target.suffix.lower().lstrip(".")
    if f".{kind}" not in KINDS:
        raise DataError(f"picture {path}: no such kind, '{target.suffix}'; give a name in .png, .svg or .html.")
    figure = _figure(rows, sweeps, "" if kind == "html" else title)
    if kind != "html":
        save(figure, target, kind)
        return
    with TemporaryDirectory() as folder:
        save(figure, drawn := Path(folder, "plan.svg"), "svg")
        svg = drawn.read_text(encoding="utf-8")
    drawing = f'<figure class="drawing">{svg[svg.index("<svg") :]}</figure>'
    heading = f"<h1>{escape(title)}</h1>\n" if title else ""
    with replaced(target) as temporary:
        body = heading + (drawing if words is None else words.around(drawing))
        temporary.write_text(shell(title or "plan", body), encoding="utf-8")


def change_of(row: Prediction) -> str:
    """Returns a policy's change against baseline as text, ``−16.0%``."""
    return f"{row.change:+.1%}".replace("-0.0%", "+0.0%").replace("-", "−")


def _figure(rows: Sequence[Prediction], sweeps: Sequence[Sweep], title: str) -> Figure:
    from matplotlib.figure import Figure

    across = min(3, len(sweeps)) or 1
    down = -(-len(sweeps) // across)
    bars, panel = 1.3 + 0.4 * len(rows), 3.9  # inches
    figure = Figure(figsize=(WIDTH, bars + panel * down + 0.4 * bool(title)), facecolor="white", layout="constrained")
    top, *below = figure.subfigures(
        1 + (down > 0), 1, height_ratios=[bars, *([panel * down] * (down > 0))], squeeze=False
    )[:, 0]
    _draw_bars(top.subplots(), rows)
    if sweeps:
        axes = below[0].subplots(down, across, squeeze=False).ravel()
        looks = _looks([row.policy for found in sweeps for row in found.rows[0]])
        for axis, found in zip(axes, sweeps, strict=False):
            _draw_sweep(axis, found, looks)
        for axis in axes[len(sweeps) :]:
            axis.set_visible(False)
        handles, labels = axes[0].get_legend_handles_labels()
        below[0].legend(handles, labels, loc="outside lower left", ncols=len(labels), fontsize=9.5, frameon=False)
    if title:
        look: dict[str, Any] = {"fontsize": 14, "fontweight": "bold", "color": INK, "parse_math": False}
        figure.suptitle(title, x=0.01, ha="left", **look)
    return figure


def _looks(policies: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns the look of each policy's line; each is thinner than the one below it, so that both show."""
    names = list(dict.fromkeys(policies))
    own = [name for name in names if name not in _POLICIES]
    known = {**_POLICIES, **{name: _EXTRA[at % len(_EXTRA)] for at, name in enumerate(own)}}
    return {
        name: {"color": known[name][0], "marker": known[name][1], "linewidth": 3.4 - 1.8 * at / len(names)}
        for at, name in enumerate(names)
    }


def _plain(axis: Axes, name: str) -> None:
    axis.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=7)
    axis.tick_params(labelsize=9, colors=INK)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_bars(axis: Axes, rows: Sequence[Prediction]) -> None:
    _plain(axis, "predicted time per step, and its change against baseline")
    bounds = [row.lower_bound_step_s for row in rows]
    longest = max(*(row.step_s for row in rows), *bounds) or 1.0
    waits = {
        cause: [row.exposed_wait_by_cause.get(cause, 0.0) for row in rows]
        for row in rows
        for cause in row.exposed_wait_by_cause
    }
    seen = sorted((cause for cause, of in waits.items() if max(of) >= _SEEN * longest), key=lambda c: -max(waits[c]))
    parts = {"GPU work": [row.step_s - row.exposed_wait_s for row in rows], **{cause: waits[cause] for cause in seen}}
    # Causes too small to see are summed up, so that the legend stays short and the bar complete.
    rest = [row.step_s - sum(of[at] for of in parts.values()) for at, row in enumerate(rows)]
    if max(rest) >= _SEEN * longest:
        parts["other"] = [a + b for a, b in zip(parts.get("other", [0.0] * len(rows)), rest, strict=True)]
    tints = cause_colours(name for name in parts if name != "GPU work")
    left = [0.0] * len(rows)
    for at, (name, seconds) in enumerate(parts.items()):
        look: dict[str, Any] = {"facecolor": _GPU, "label": name}
        if name in tints:
            look = {**HATCHED, "facecolor": tints[name][0], "hatch": _HATCHES[(at - 1) % len(_HATCHES)]}
            look["label"] = f"exposed wait: {name}"
        axis.barh(range(len(rows)), seconds, left=left, height=0.62, **look)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    ys = [at + side for at in range(len(rows)) for side in (-0.44, 0.44, float("nan"))]
    xs = [bound for bound in bounds for _ in range(3)]
    axis.plot(xs, ys, color=INK, linewidth=1.4, linestyle=_DASHED, label="lower bound")
    for at, row in enumerate(rows):
        seconds = f"{row.step_s:,.1f} s" if row.step_s >= 10 else f"{digits(row.step_s, 3)} s"
        # Baseline is the reference, so its own change is left out, and so is that of a log, which has none.
        label = seconds if row.policy in ("baseline", AS_LOGGED) else f"{seconds}  ({change_of(row)})"
        axis.annotate(label, (max(row.step_s, bounds[at]), at), (8, 0), textcoords="offset points",
                      va="center_baseline", fontsize=10, color=INK)  # fmt: skip
    axis.set_xlim(0, 1.2 * longest)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [row.policy for row in rows], fontsize=10, color=INK, parse_math=False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_xlabel("seconds a step", color=INK, fontsize=10)
    handles, labels = axis.get_legend_handles_labels()
    order = sorted(range(len(labels)), key=lambda at: labels[at] == "lower bound")
    axis.figure.legend(
        [handles[at] for at in order], [labels[at] for at in order], loc="outside lower left",
        ncols=columns_that_fit(labels, WIDTH - 1.5), fontsize=9.5, frameon=False,
    )  # fmt: skip


def _draw_sweep(axis: Axes, found: Sweep, looks: Mapping[str, Mapping[str, Any]]) -> None:
    _plain(axis, found.knob)
    even = found.knob == "mini_batches"
    places = list(range(len(found.values))) if even else list(found.values)
    for column in zip(*found.rows, strict=True):
        look = looks[column[0].policy]
        axis.plot(places, [row.step_s for row in column], label=column[0].policy, markersize=7,
                  markeredgecolor="white", clip_on=False, **look)  # fmt: skip
    # Policies share most of their bounds: the lowest is that of all.
    bounds = [min(row.lower_bound_step_s for row in rows) for rows in found.rows]
    axis.plot(places, bounds, color="#808080", linewidth=1.6, linestyle=_DASHED, label="lowest lower bound", zorder=3)
    if not even:
        axis.set_xscale("log", base=2)
        axis.minorticks_off()
    shown = range(0, len(places), math.ceil(len(places) / 12))
    axis.set_xticks([places[at] for at in shown], [f"{found.values[at]:,.10g}" for at in shown])
    axis.set_ylim(0)
    axis.tick_params(axis="y", length=0)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_xlabel(_KNOBS.get(found.knob, found.knob), color=INK, fontsize=10)
    axis.set_ylabel("predicted seconds a step", color=INK, fontsize=10)


def _sentence(text: str) -> str:
    return escape(text if text.endswith(".") else f"{text}.")


def _table(cells: Table, looks: Mapping[str, str]) -> str:
    head, *rows = ([escape(cell) for cell in row] for row in cells)
    return table(head, rows, [looks.get(row[0], "") for row in cells[1:]])
