"""The plan as a picture: what each policy's step consists of, and its time over each knob."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.drawing.duration import figure as digits
from dataflow.drawing.style import HATCHED, INK, OTHERS, WIDTH, cause_colours, columns_that_fit, save
from dataflow.errors import DataError
from dataflow.planning.planner import AS_LOGGED, Prediction, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GPU = "#5F7A8A"
_DASHED = (0, (3, 2))
_SEEN = 0.004
"""Share of the longest bar; less is too small to see."""


def draw_plan(rows: Sequence[Prediction], sweeps: Sequence[Sweep], path: Path, title: str = "") -> None:
    """Draws a plan into a file: a bar for each policy, then a panel for each sweep.

    The file, ``.png`` (1400 pixels wide) or ``.svg``, is replaced atomically.
    """
    from matplotlib.figure import Figure

    if path.suffix.lower() not in (".png", ".svg"):
        raise DataError(f"picture {path}: no such kind, '{path.suffix}'; give a name in .png, .svg or .html.")
    heights = [1.3 + 0.4 * len(rows), *([3.9] if sweeps else [])]  # inches
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4 * bool(title)), facecolor="white", layout="constrained")
    top, *below = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_bars(top.subplots(), rows)
    if sweeps:
        axes = below[0].subplots(1, len(sweeps), squeeze=False).ravel()
        for axis, found in zip(axes, sweeps, strict=True):
            _draw_sweep(axis, found)
        handles, labels = axes[0].get_legend_handles_labels()
        below[0].legend(handles, labels, loc="outside lower left", ncols=len(labels), fontsize=9.5, frameon=False)
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=14, fontweight="bold", color=INK, parse_math=False)
    save(figure, path, path.suffix.lower().lstrip("."))


def _plain(axis: Axes, name: str) -> None:
    axis.set_title(name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=7)
    axis.tick_params(labelsize=9, colors=INK)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def _draw_bars(axis: Axes, rows: Sequence[Prediction]) -> None:
    _plain(axis, "predicted time per step, and its change against baseline")
    longest = max(max(row.step_s, row.lower_bound_step_s) for row in rows) or 1.0
    waits: dict[str, list[float]] = {}
    for at, row in enumerate(rows):
        for cause, seconds in row.exposed_wait_by_cause.items():
            # Causes too small to see are summed up, so that the legend stays short and the bar complete.
            name = cause if seconds >= _SEEN * longest else "other"
            waits.setdefault(name, [0.0] * len(rows))[at] += seconds
    tints, left = cause_colours(waits), [row.step_s - row.exposed_wait_s for row in rows]
    axis.barh(range(len(rows)), left, height=0.62, facecolor=_GPU, label="GPU work")
    for cause, seconds in sorted(waits.items(), key=lambda each: (each[0] == "other", -max(each[1]))):
        look = {**HATCHED, "facecolor": tints[cause][0], "label": f"exposed wait: {cause}"}
        axis.barh(range(len(rows)), seconds, left=left, height=0.62, **look)
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    for at, row in enumerate(rows):
        bound, label = row.lower_bound_step_s, "" if at else "lower bound"
        axis.plot([bound] * 2, [at - 0.44, at + 0.44], color=INK, linewidth=1.4, linestyle=_DASHED, label=label)
        seconds_a_step = f"{row.step_s:,.1f} s" if row.step_s >= 10 else f"{digits(row.step_s, 3)} s"
        # Baseline is the reference, so its own change is left out, and so is that of a log, which has none.
        change = "" if row.policy in ("baseline", AS_LOGGED) else f"  ({row.change:+.1%})"
        axis.annotate(seconds_a_step + change, (max(row.step_s, bound), at), (8, 0), textcoords="offset points",
                      va="center_baseline", fontsize=10, color=INK)  # fmt: skip
    axis.set_xlim(0, 1.2 * longest)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_yticks(range(len(rows)), [row.policy for row in rows], fontsize=10, color=INK, parse_math=False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
    axis.set_xlabel("seconds a step", color=INK, fontsize=10)
    handles, labels = axis.get_legend_handles_labels()
    columns = columns_that_fit(labels, WIDTH - 1.5)
    axis.figure.legend(handles, labels, loc="outside lower left", ncols=columns, fontsize=9.5, frameon=False)


def _draw_sweep(axis: Axes, found: Sweep) -> None:
    _plain(axis, found.knob)
    places = [f"{value:,.10g}" for value in found.values]
    for at, column in enumerate(zip(*found.rows, strict=True)):
        steps = [row.step_s for row in column]
        axis.plot(places, steps, label=column[0].policy, color=OTHERS[at % len(OTHERS)], marker="o", clip_on=False)
    # Policies share most of their bounds: the lowest is that of all.
    bounds = [min(row.lower_bound_step_s for row in rows) for rows in found.rows]
    axis.plot(places, bounds, color="#808080", linewidth=1.6, linestyle=_DASHED, label="lowest lower bound", zorder=3)
    axis.set_ylim(0)
    axis.tick_params(axis="y", length=0)
    axis.grid(color="#DDDDDD", linewidth=0.6)
    axis.set_xlabel(found.knob, color=INK, fontsize=10)
    axis.set_ylabel("predicted seconds a step", color=INK, fontsize=10)
