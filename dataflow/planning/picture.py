"""The plan as a picture: what each policy's step is made of, and how it changes over each knob."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.drawing.style import HATCHED, INK, WIDTH, columns_that_fit, save
from dataflow.errors import DataError
from dataflow.files import replaced
from dataflow.planning.planner import Prediction, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours again, in tones that show on white and on black: colour, marker, its size in points (so that
# all look as large), the same marker in plotly.
_POLICIES = {
    "baseline": ("#D55E00", "o", 8.5, "circle"),
    "mini-batch": ("#E69F00", "s", 8.0, "square"),
    "off-policy": ("#56B4E9", "D", 7.5, "diamond"),
    "both": ("#0072B2", "^", 9.5, "triangle-up"),
    "both+stream": ("#009E73", "P", 9.5, "cross"),
}
_SPARE = (
    ("#CC79A7", "v", 9.5, "triangle-down"),
    ("#8C6D1F", "X", 9.5, "x"),
    ("#6A51A3", "p", 9.5, "pentagon"),
    ("#B0413E", "<", 9.5, "triangle-left"),
)
KINDS = (".png", ".svg", ".html")
GPU = "#5F7A8A"
BOUND = "#808080"
_DASHES = (0, (3, 2))
# Cause of a wait: the tint under its hatching, the hatching, the same one in plotly.
_CAUSES = {
    "rewards": ("#FBE3AE", "////", "/"),
    "controller": ("#E3DAF0", "\\\\\\\\", "\\"),
    "dispatch": ("#D5E8DC", "....", "."),
    "start-up": (HATCHED["facecolor"], "xxxx", "x"),
    "io": ("#DCE6F2", "----", "-"),
    "other": (HATCHED["facecolor"], "||||", "|"),
}
_SPARE_CAUSES = (("#F2D9D2", "++++", "+"), ("#E2E5C4", "||||", "|"), ("#D3E6E9", "////", "/"))
BESIDE = "markers side by side: (nearly) the same time"
_NEAR = 0.012  # of the highest line: markers nearer than that hide each other
_SEEN = 0.004  # of the longest bar or the highest line: less cannot be seen
_KNOBS = {
    "reward.concurrency": "reward requests in flight at most",
    "reward.rpm": "reward requests a minute at most",
    "mini_batches": "mini-batches (optimizer steps) a step",
}


def draw_plan(
    rows: Sequence[Prediction], sweeps: Sequence[Sweep], path: str | os.PathLike[str], title: str = ""
) -> None:
    """Draws a plan: a bar for each policy, then a panel for each sweep.

    Args:
        rows: a prediction for each policy.
        sweeps: of knobs, or none.
        path: ends in ``.png`` (1400 pixels wide), ``.svg`` or ``.html`` (one file that needs no network); replaced in
            one go.
        title: over the whole picture.

    Raises:
        DataError: another kind of file, or nothing to draw.
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
        from dataflow.planning.page import page

        text = page(bars, panels, title)
        with replaced(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    else:
        save(_figure(bars, panels, title), target, kind)


# --- what is drawn, whatever draws it ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Style:
    """How a policy's line looks; each is thinner than the one below it, so that both show where they coincide."""

    colour: str
    marker: str
    size: float
    symbol: str
    thickness: float


@dataclass(frozen=True)
class Line:
    """A policy over the values of a knob: seconds a step."""

    policy: str
    times: list[float]
    bounds: list[float]
    rows: list[Prediction]


class Bars:
    """The policies: of what a step is made, seconds a step, as (what, seconds of each policy)."""

    def __init__(self, rows: Sequence[Prediction]) -> None:
        self.rows = list(rows)
        self.bounds = [row.lower_bound_step_s for row in rows]
        self.longest = max(*(row.step_s for row in rows), *self.bounds) or 1.0
        waits = [row.exposed_wait_by_cause for row in rows]
        most = {cause: max(w.get(cause, 0.0) for w in waits) for cause in dict.fromkeys(c for w in waits for c in w)}
        seen = sorted((c for c in most if most[c] >= _SEEN * self.longest), key=lambda c: -most[c])
        self.parts = [("GPU work", [row.step_s - row.exposed_wait_s for row in rows])]
        self.parts += [(cause, [w.get(cause, 0.0) for w in waits]) for cause in seen]
        # A sliver of each of many causes would be all legend and no picture; their sum completes the bar.
        rest = [row.exposed_wait_s - sum(w.get(c, 0.0) for c in seen) for row, w in zip(rows, waits, strict=True)]
        if max(rest) >= _SEEN * self.longest:
            self.parts.append(("other", rest))
        self.labels = [_ends_in(row) for row in rows]
        own = sorted(what for what, _ in self.parts[1:] if what not in _CAUSES)
        spare = {cause: _SPARE_CAUSES[i % len(_SPARE_CAUSES)] for i, cause in enumerate(own)}
        self.hatching = {what: _CAUSES.get(what) or spare[what] for what, _ in self.parts[1:]}
        self.names = {what: f"exposed wait: {what}" if what in self.hatching else what for what, _ in self.parts}


class Panel:
    """A sweep: where its values stand on an axis that is linear in what is drawn, and a line for each policy."""

    def __init__(self, sweep: Sweep) -> None:
        self.knob = sweep.knob
        self.even = sweep.knob == "mini_batches"
        self.places = [float(i) if self.even else math.log2(v) for i, v in enumerate(sweep.values)]
        self.words = [f"{v:,.10g}" for v in sweep.values]
        self.unit = _KNOBS.get(sweep.knob, sweep.knob) + ("" if self.even else " (log2)")
        columns = list(zip(*sweep.rows, strict=True))
        self.lines = [
            Line(c[0].policy, [r.step_s for r in c], [r.lower_bound_step_s for r in c], list(c)) for c in columns
        ]
        self.highest = max(y for line in self.lines for y in (*line.times, *line.bounds)) or 1.0
        self.gap = min((b - a for a, b in pairwise(self.places)), default=1.0) or 1.0
        pad = 0.05 * (self.places[-1] - self.places[0]) or 0.5
        self.range = (self.places[0] - pad, self.places[-1] + pad)

    def beside(self, inches: float) -> list[list[float]]:
        """Returns where each line's markers stand on a panel so wide: side by side where they would hide each other."""
        inch = (self.range[1] - self.range[0]) / inches
        found = [list(self.places) for _ in self.lines]
        for i in range(len(self.places)):
            order = sorted(range(len(self.lines)), key=lambda at: self.lines[at].times[i])
            groups: list[list[int]] = []
            for at in order:
                if groups and self.lines[at].times[i] - self.lines[groups[-1][-1]].times[i] < _NEAR * self.highest:
                    groups[-1].append(at)
                else:
                    groups.append([at])
            for group in groups:
                step = min(0.125 * inch, 0.85 * self.gap / len(group))
                for nth, at in enumerate(sorted(group)):
                    found[at][i] += (nth - (len(group) - 1) / 2) * step
        return found

    @property
    def crowded(self) -> bool:
        """Whether any markers stand side by side."""
        return any(at != self.places for at in self.beside(WIDTH))

    def same(self, a: float, b: float) -> bool:
        """Whether an eye cannot tell two times apart."""
        return abs(a - b) < _SEEN * self.highest

    def bounds(self) -> dict[str, list[list[tuple[float, float]]]]:
        """Returns the lower bounds to draw: policy -> lines of points; under "" those that several policies share.

        Bounds may part along the way, so this goes by the pieces between one value and the next.
        """
        places, heights = self.places, [line.bounds for line in self.lines]
        if len(places) == 1:
            places, heights = [places[0] - 0.2, places[0] + 0.2], [h * 2 for h in heights]
        found: dict[str, list[list[tuple[float, float]]]] = {}
        for i in range(len(places) - 1):
            groups: list[list[int]] = []
            for at, h in enumerate(heights):
                near = (g for g in groups if all(self.same(heights[g[0]][j], h[j]) for j in (i, i + 1)))
                if (group := next(near, None)) is None:
                    groups.append([at])
                else:
                    group.append(at)
            for group in groups:
                begin, end = ((places[j], heights[group[0]][j]) for j in (i, i + 1))
                lines = found.setdefault("" if len(group) > 1 else self.lines[group[0]].policy, [])
                for line in lines:
                    # A line that goes on is one line, or its dashes would start anew at each value.
                    if line[-1][0] == begin[0] and self.same(line[-1][1], begin[1]):
                        line.append(end)
                        break
                else:
                    lines.append([begin, end])
        return found


def seconds_of(value: float) -> str:
    """Returns a time as it is written beside a bar."""
    return f"{value:,.1f} s" if value >= 10 else f"{value:.3g} s"


def change_of(row: Prediction) -> str:
    """Returns a policy's change against baseline."""
    return f"{row.change:+.1%}".replace("-0.0%", "+0.0%").replace("-", "−")


def _ends_in(row: Prediction) -> str:
    # The baseline is what the others are compared with.
    return seconds_of(row.step_s) + ("" if row.policy == "baseline" else f"  ({change_of(row)})")


def styles_of(panels: Iterable[Panel]) -> dict[str, Style]:
    """Returns how each policy of some sweeps looks, in all of them."""
    names = list(dict.fromkeys(line.policy for panel in panels for line in panel.lines))
    own = [n for n in names if n not in _POLICIES]
    looks = {**_POLICIES, **{name: _SPARE[i % len(_SPARE)] for i, name in enumerate(own)}}
    return {name: Style(*looks[name], 3.4 - 1.8 * i / max(1, len(names) - 1)) for i, name in enumerate(names)}


# --- matplotlib -------------------------------------------------------------------------------------------------------


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
    shown = _that_fit(panel, inches)
    axis.set_xticks([panel.places[i] for i in shown], [panel.words[i] for i in shown])
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:,.6g}")
    axis.tick_params(axis="y", length=0)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_xlabel(panel.unit, color=INK, fontsize=10)
    axis.set_ylabel("predicted seconds a step", color=INK, fontsize=10)


def _that_fit(panel: Panel, inches: float) -> list[int]:
    """Indices of the values whose labels have room, from the last back."""
    inch = inches / (panel.range[1] - panel.range[0])
    shown: list[int] = []
    for i in reversed(range(len(panel.places))):
        if shown:
            room = 0.045 * (len(panel.words[i]) + len(panel.words[shown[-1]])) + 0.08
            if (panel.places[shown[-1]] - panel.places[i]) * inch < room:
                continue
        shown.append(i)
    return shown[::-1]
