"""The timeline as a picture: a row per resource, a colour per stage, hatching where a GPU pool waits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.drawing.style import COLOURS, HATCHED, INK, PIXELS, WIDTH, colours, columns_that_fit, contrast, save
from dataflow.timeline.causes import exposed_waits, pool_waits
from dataflow.timeline.spans import POOLS, Span, Trace, in_flight, lanes, looks
from dataflow.timeline.text import extent, named, tick

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BAND = "#F3C766"
_GAP = "#C00000"
_POOL, _AGENT, _THIN, _APART = 0.62, 0.5, 0.2, 0.07
"""Inches: a GPU pool, a reward agent, a lane of another resource, between two rows."""
_LINES: dict[str, dict[str, Any]] = {
    "end of training": {"color": INK, "linewidth": 1.2, "linestyle": (0, (3, 2))},
    "killed and resumed": {"color": _GAP, "linewidth": 3, "linestyle": "-"},
}


def draw(traces: Mapping[str, Trace] | Trace, path: str | os.PathLike[str]) -> None:
    """Draws runs on one time axis, a panel for each; the others are compared with the first.

    The file, ``.png`` (1400 pixels wide) or ``.svg``, is replaced atomically.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    panels = [_Panel(name, trace) for name, trace in named(traces, f"picture {path}").items()]
    colour = colours(*looks(p.trace for p in panels))
    longest = max(p.end - p.begin for p in panels) or 1.0
    shown = {span.stage for p in panels for _, rows, _ in p.rows for lane in rows for span in lane}
    handles: list[Any] = [Patch(color=colour[s], label=s) for s in colour if s in shown]
    handles.append(Patch(**HATCHED, label="exposed wait"))
    if any(p.levels for p in panels):
        most = max(level for p in panels for levels in p.levels.values() for _, level in levels)
        handles.append(Patch(color=_BAND, label=f"rewards in flight (at most {most})"))
    lines = list(_LINES)[: 1 + any(p.trace.gaps for p in panels)]
    handles += [Line2D([], [], label=name, **_LINES[name]) for name in lines]
    columns = columns_that_fit([h.get_label() for h in handles], WIDTH * 0.915)
    top, gap, bottom = 0.4, 0.5, 0.75 + 0.2 * -(-len(handles) // columns)
    total = top + sum(p.height for p in panels) + gap * (len(panels) - 1) + bottom
    figure = Figure(figsize=(WIDTH, total), dpi=PIXELS, facecolor="white")
    at = total - top
    for panel in panels:
        axis = figure.add_axes((0.075, (at - panel.height) / total, 0.915, panel.height / total))
        panel.draw(axis, colour, longest, panels[0])
        axis.tick_params(labelbottom=panel is panels[-1])
        at -= panel.height + gap
    axis.set_xlabel("seconds from the first task", color=INK, fontsize=10)
    look = {"fontsize": 9.5, "frameon": False, "labelcolor": INK, "handlelength": 1.4, "columnspacing": 1.4}
    place = (0.07, 0.08 / total)
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=place, ncols=columns, borderaxespad=0, **look)
    save(figure, Path(path), Path(path).suffix.lower().lstrip("."))


class _Panel:
    """One run, with its rows from top to bottom; heights in inches."""

    def __init__(self, name: str, trace: Trace) -> None:
        self.name, self.trace = name, trace
        self.begin, self.end = extent(trace)
        self.levels: dict[str, list[tuple[float, int]]] = {}
        self.rows: list[tuple[str, list[list[Span]], float]] = []
        collects = trace.with_role("collects")
        for resource in trace.resources:
            on = trace.on(resource)
            if levels := in_flight(mark for mark in trace.marks if mark.resource == resource):
                # The band shows the requests; of the tasks that collect them, only the ends are drawn.
                self.levels[resource] = levels
                on = [s for s in on if s.stage not in collects]
            rows = lanes(on)
            if rows or levels:
                other = _THIN * max(1, min(len(rows), 4))
                self.rows.append((resource, rows, _AGENT if levels else _POOL if resource in POOLS else other))
        self.height = sum(h for *_, h in self.rows) + _APART * (len(self.rows) + 1)

    def draw(self, axis: Axes, colour: Mapping[str, str], longest: float, reference: _Panel) -> None:
        axis.set_xlim(0, longest * 1.005)
        axis.set_ylim(0, self.height)
        pixels = WIDTH * 0.915 * PIXELS / (longest * 1.005)  # per second
        at = self.height - _APART
        middles = []
        for resource, rows, height in self.rows:
            below = at - height
            if resource in self.levels:
                self._band(axis, resource, below, height * (0.62 if rows else 1.0))
            for i, lane in enumerate(rows):
                # The lower part of the row is reserved for the band.
                tall = (height * 0.32 if resource in self.levels else height) / len(rows)
                self._lane(axis, lane, at - (i + 1) * tall, tall, colour, pixels)
            if resource in POOLS:
                waits = [(w.begin - self.begin, w.seconds) for w in exposed_waits(self.trace, resource)]
                axis.broken_barh(waits, (below, height), **HATCHED)
            middles.append(below + height / 2)
            at = below - _APART
        axis.set_yticks(middles, [resource for resource, *_ in self.rows], fontsize=10, color=INK)
        axis.tick_params(axis="y", length=0)
        axis.tick_params(axis="x", labelsize=9, colors=INK)
        size = tick(longest, 14)
        axis.set_xticks([i * size for i in range(int(longest / size + 1e-9) + 1)])
        axis.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axis.set_axisbelow(True)
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
        axis.axvline(self.trace.window[1] - self.begin, **_LINES["end of training"])
        for gap in self.trace.gaps:
            axis.axvline(gap.at - self.begin, zorder=4, **_LINES["killed and resumed"])
        name = axis.set_title(self.name, loc="left", fontsize=11, fontweight="bold", color=INK, pad=5)
        wall = self.trace.wall
        facts = [f"{wall:.1f} s"]
        if self is not reference and reference.trace.wall > 0:
            facts.append(f"{wall / reference.trace.wall - 1:+.1%} against {reference.name}".replace("-", "−", 1))
        if self.trace.pools and wall > 0:
            facts += [f"{pool} busy {self.trace.busy(pool) / wall:.0%}" for pool in self.trace.pools]
            facts.append(f"exposed wait {sum(pool_waits(self.trace).values()):.1f} s")
        if (status := self.trace.meta.get("status", "finished")) != "finished":
            facts.append(status)
        facts += [gap.words for gap in self.trace.gaps]
        axis.annotate(",  ".join(facts), xy=(1, 0), xycoords=name, xytext=(8, 0), textcoords="offset points",
                      va="bottom", fontsize=11, color=INK)  # fmt: skip

    def _lane(
        self, axis: Axes, lane: Sequence[Span], below: float, height: float, colour: Mapping[str, str], pixels: float
    ) -> None:
        bars: dict[tuple[str, float], list[tuple[float, float]]] = {}
        for span in lane:
            # Keep very short tasks visible: at least a pixel wide, and without an edge, which would hide the colour.
            wide = max(span.end - span.begin, 1.2 / pixels)
            edge = 0.7 if wide * pixels >= 4 else 0.0
            bars.setdefault((span.stage, edge), []).append((span.begin - self.begin, wide))
            for size in (9.0, 8.0, 7.0):
                # Digits are 0.64 of the font size wide, a point half of that.
                room = size * (0.64 * len(span.label) - 0.32 * span.label.count(".")) + 2
                if size <= height * 72 * 0.75 and room * PIXELS / 72 <= wide * pixels:
                    middle = (span.begin + span.end) / 2 - self.begin
                    axis.text(middle, below + height / 2, span.label, ha="center", va="center_baseline",
                              fontsize=size, color=contrast(colour[span.stage]))  # fmt: skip
                    break
        for (stage, edge), places in bars.items():
            axis.broken_barh(places, (below, height), facecolor=colour[stage], edgecolor="white", linewidth=edge)

    def _band(self, axis: Axes, agent: str, below: float, room: float) -> None:
        """Draws an agent's requests in flight, and a line where its rewards of a part were complete."""
        levels = self.levels[agent]
        most = max(level for _, level in levels)
        times, tops = [time - self.begin for time, _ in levels], [below + level / most * room for _, level in levels]
        axis.fill_between(times, below, tops, step="post", color=_BAND, linewidth=0)
        collects = self.trace.with_role("collects")
        ends = [s.end - self.begin for s in self.trace.spans if s.stage in collects and s.resource == agent]
        axis.vlines(ends, below, below + room, color=COLOURS["collects"][0], linewidth=1.3)
