"""The plan as a picture: what each policy's step consists of, and its time over each knob."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.drawing.style import HATCHED, INK, WIDTH, columns_that_fit, save
from dataflow.errors import DataError
from dataflow.files import replaced
from dataflow.planning.drawing.chart import BESIDE, BOUND, GPU, Bars, Panel, Style, styles_of
from dataflow.planning.planner import Prediction, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from dataflow.planning.drawing.words import Words

KINDS = (".png", ".svg", ".html")
_DASHES = (0, (3, 2))


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
        DataError: the file name has another ending, or there is nothing to draw.
    """
    target = Path(path)
    if target.suffix.lower() not in KINDS:
        raise DataError(f"picture {path}: no such kind, '{target.suffix}'; give a name in .png, .svg or .html.")
    kind = target.suffix.lower().lstrip(".")
    if not rows:
        raise DataError(f"picture {path}: there is no policy to draw; give the prediction of one.")
    for sweep in sweeps:
        if not sweep.values or not all(sweep.rows) or len(sweep.rows) != len(sweep.values):
            raise DataError(
                f"picture {path}: no prediction for a value of {sweep.knob}; give one for each, or no sweep."
            )
    bars, panels = Bars(rows), [Panel(sweep) for sweep in sweeps]
    if kind == "html":
        from dataflow.planning.drawing.page import page

        text = page(bars, panels, title, words)
        with replaced(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    else:
        save(_figure(bars, panels, title), target, kind)


def _figure(bars: Bars, panels: Sequence[Panel], title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    styles = styles_of(panels)
    names = max(len(row.policy) for row in bars.rows)
    left, right = max(0.95, 0.088 * names + 0.15), 0.15  # inches, as everything here
    side = min(left, 1.2)
    wide = WIDTH - left - right
    across = len(panels) if len(panels) <= 3 else 2
    down = -(-len(panels) // across) if panels else 0
    below: list[Any] = []
    for name, style in styles.items():
        look = {"color": style.colour, "linewidth": style.thickness, "marker": style.marker, "markersize": style.size}
        below.append(Line2D([], [], label=name, **look))
    shared = {name: None for panel in panels for name in panel.bounds()}
    for name in sorted(shared, key=lambda n: ["", *styles].index(n)):
        look = {"color": styles[name].colour if name else BOUND, "linewidth": 1.6, "linestyle": _DASHES}
        below.append(Line2D([], [], label=f"lower bound of {name}" if name else "lower bound", **look))
    columns = columns_that_fit([h.get_label() for h in below], WIDTH - 1.5) if below else 1
    tall = 0.4 * len(bars.rows) + 0.1
    above = columns_that_fit([*bars.names.values(), "lower bound"], wide - 1.5)
    top, under = (0.85 if title else 0.45), 0.78 + 0.22 * -(-(len(bars.names) + 1) // above)
    note = 0.22 if any(panel.crowded for panel in panels) else 0.0
    high, each, last = 3.1, 1.0, 0.1 + note + 0.22 * -(-len(below) // columns)
    total = top + tall + under + down * (high + each) + (last if panels else -0.1)
    figure = Figure(figsize=(WIDTH, total), facecolor="white")

    def place(x: float, y: float, w: float, h: float) -> Axes:
        return figure.add_axes((x / WIDTH, 1 - (y + h) / total, w / WIDTH, h / total))

    _draw_bars(place(left, top, wide, tall), bars, wide, above)
    for i, panel in enumerate(panels):
        # The last row may have fewer; they share its width.
        row, column = divmod(i, across)
        beside = min(across, len(panels) - row * across)
        inside = (WIDTH - side - right - 0.75 * (beside - 1)) / beside
        axis = place(side + column * (inside + 0.75), top + tall + under + 0.3 + row * (high + each), inside, high)
        _draw_sweep(axis, panel, styles, inside)
    if below:
        _legend(figure, below, columns, (side / WIDTH, (0.1 + note) / total))
    if note:
        figure.text((side + 0.04) / WIDTH, 0.14 / total, BESIDE, fontsize=9, color="#666666")
    if title:
        look = {"fontsize": 14, "fontweight": "bold", "color": INK, "va": "center", "parse_math": False}
        figure.text(side / WIDTH, 1 - 0.28 / total, title, **look)
    return figure


def _legend(
    on: Figure | Axes, handles: Sequence[Any], columns: int, at: tuple[float, float], to: str = "lower"
) -> None:
    look = {"fontsize": 9.5, "frameon": False, "labelcolor": INK, "borderaxespad": 0, "columnspacing": 1.6}
    on.legend(handles=handles, loc=f"{to} left", bbox_to_anchor=at, ncols=columns, handlelength=2.2, **look)


def _plain(axis: Axes, name: str) -> None:
    axis.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=7)
    axis.tick_params(labelsize=9, colors=INK)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_bars(axis: Axes, bars: Bars, wide: float, columns: int) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    _plain(axis, "predicted time per step, and its change against baseline")
    count = len(bars.rows)
    from_ = [0.0] * count
    handles: list[Any] = []
    for what, seconds in bars.parts:
        look: dict[str, Any] = {"facecolor": GPU}
        if what in bars.hatching:
            tint, hatch, _ = bars.hatching[what]
            look = {**HATCHED, "facecolor": tint, "hatch": hatch}
        axis.barh(range(count), seconds, left=from_, height=0.62, **look)
        from_ = [a + s for a, s in zip(from_, seconds, strict=True)]
        handles.append(Patch(**look, label=bars.names[what]))
    line = {"color": INK, "linewidth": 1.4, "linestyle": _DASHES}
    for at, bound in enumerate(bars.bounds):
        axis.plot([bound, bound], [at - 0.44, at + 0.44], **line)
    handles.append(Line2D([], [], **line, label="lower bound"))
    for at, (row, label) in enumerate(zip(bars.rows, bars.labels, strict=True)):
        end = (max(row.step_s, bars.bounds[at]), at)
        axis.annotate(label, end, (8, 0), textcoords="offset points", va="center_baseline", fontsize=10, color=INK)
    room = 0.25 + 0.085 * max(map(len, bars.labels))  # inches, for the labels
    axis.set_xlim(0, bars.longest * wide / max(wide - room, 0.3 * wide))
    axis.set_ylim(count - 0.5, -0.5)
    names = [row.policy for row in bars.rows]
    axis.set_yticks(range(count), names, fontsize=10, color=INK, parse_math=False)
    axis.tick_params(axis="y", length=0)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.6g}")
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_xlabel("seconds a step", color=INK, fontsize=10)
    tall = axis.get_position().height * axis.figure.get_figheight()
    _legend(axis, handles, columns, (0, -0.62 / tall), "upper")


def _draw_sweep(axis: Axes, panel: Panel, styles: Mapping[str, Style], inches: float) -> None:
    _plain(axis, panel.knob)
    places = panel.beside(inches)
    # Where values are close together, markers are smaller.
    scale = min(1.0, max(0.5, panel.gap / (panel.range[1] - panel.range[0]) * inches / 0.17))
    for nth, (line, at) in enumerate(zip(panel.lines, places, strict=True)):
        style = styles[line.policy]
        axis.plot(panel.places, line.times, color=style.colour, linewidth=style.thickness, zorder=2 + 0.01 * nth)
        look = {"marker": style.marker, "markersize": style.size * scale, "markeredgewidth": 0.8 * scale}
        look |= {"color": style.colour, "linestyle": "none", "markeredgecolor": "white", "clip_on": False}
        axis.plot(at, line.times, zorder=4 + 0.01 * nth, **look)
    # A bound that a policy reaches lies on its line: dashes over it, and its markers over them.
    for name, lines in panel.bounds().items():
        colour = styles[name].colour if name else BOUND
        for points in lines:
            axis.plot(*zip(*points, strict=True), color=colour, linewidth=1.6, linestyle=_DASHES, zorder=3)
    axis.set_xlim(panel.range)
    axis.set_ylim(0, panel.highest * 1.06)
    shown = panel.labelled(inches)
    axis.set_xticks([panel.places[i] for i in shown], [panel.words[i] for i in shown])
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.6g}")
    axis.tick_params(axis="y", length=0)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_xlabel(panel.unit, color=INK, fontsize=10)
    axis.set_ylabel("predicted seconds a step", color=INK, fontsize=10)
