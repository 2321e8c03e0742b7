"""What a plan's drawing shows, whether as a picture or as a page: bars of the policies, a panel for each sweep."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dataflow.drawing.duration import figure
from dataflow.drawing.style import WIDTH, cause_colours
from dataflow.planning.planner import Prediction, Sweep

# Okabe and Ito's colours in tones that show on white and on black. Colour, matplotlib's marker, its size in points (all
# look equally large), bokeh's marker, the same as a character.
_POLICIES = {
    "baseline": ("#D55E00", "o", 8.5, "circle", "●"),
    "mini-batch": ("#E69F00", "s", 8.0, "square", "■"),
    "off-policy": ("#56B4E9", "D", 7.5, "diamond", "◆"),
    "both": ("#0072B2", "^", 9.5, "triangle", "▲"),
    "both+stream": ("#009E73", "P", 9.5, "plus", "✚"),
}
_EXTRA = (
    ("#CC79A7", "v", 9.5, "inverted_triangle", "▼"),
    ("#8C6D1F", "X", 9.5, "star", "★"),
    ("#6A51A3", "p", 9.5, "hex", "⬢"),
    ("#B0413E", "<", 9.5, "square_pin", "✦"),
)
GPU = "#5F7A8A"
"""Colour of GPU work."""
BOUND = "#808080"
"""Colour of a lower bound that several policies share."""
# Cause of a wait: matplotlib's hatching, bokeh's.
_HATCHES = {
    "rewards": ("////", "right_diagonal_line"),
    "controller": ("\\\\\\\\", "left_diagonal_line"),
    "dispatch": ("....", "dot"),
    "start-up": ("xxxx", "diagonal_cross"),
    "io": ("----", "horizontal_line"),
    "other": ("||||", "vertical_line"),
}
_EXTRA_HATCHES = (("++++", "cross"), ("||||", "vertical_line"), ("////", "right_diagonal_line"))
AS_LOGGED = "as logged"
"""The row of the source's own run, replayed."""
_UNCHANGED = ("baseline", AS_LOGGED)
BESIDE = "markers side by side: (nearly) the same time"
_NEAR = 0.012  # share of the highest line: markers closer than this hide each other
_SEEN = 0.004  # share of the longest bar or the highest line: less is too small to see
_KNOBS = {
    "reward.concurrency": "reward requests in flight at most",
    "reward.rpm": "reward requests a minute at most",
    "mini_batches": "mini-batches (optimizer steps) a step",
}


@dataclass(frozen=True)
class Style:
    """How a policy's line looks.

    Attributes:
        colour: of line and markers.
        marker: matplotlib's.
        size: of a marker, in points.
        symbol: bokeh's marker.
        sign: the marker as a character.
        thickness: of the line; each line is thinner than the one below it, so that both show where they coincide.
    """

    colour: str
    marker: str
    size: float
    symbol: str
    sign: str
    thickness: float

    @property
    def pixels(self) -> float:
        """Size of the marker on a page; bokeh's diamond is narrower than matplotlib's."""
        return self.size * (1.8 if self.symbol == "diamond" else 1.3)


@dataclass(frozen=True)
class PolicyLine:
    """Predicted seconds per step of one policy, for each value of a knob."""

    policy: str
    times: list[float]
    bounds: list[float]
    rows: list[Prediction]


class Bars:
    """What a step of each policy consists of.

    Attributes:
        rows: the predictions, a bar each.
        bounds: lower bound of each, in seconds per step.
        longest: seconds per step of the longest bar or bound.
        parts: (GPU work or cause of a wait, its seconds per step for each policy); each bar's parts add up to it.
        labels: the text at the end of each bar.
        hatching: cause -> (colour, matplotlib's hatching, bokeh's hatching).
        names: part -> its name in the legend.
    """

    def __init__(self, rows: Sequence[Prediction]) -> None:
        self.rows = list(rows)
        self.bounds = [row.lower_bound_step_s for row in rows]
        self.longest = max(*(row.step_s for row in rows), *self.bounds) or 1.0
        waits = [row.exposed_wait_by_cause for row in rows]
        most = {cause: max(w.get(cause, 0.0) for w in waits) for cause in dict.fromkeys(c for w in waits for c in w)}
        seen = sorted((c for c in most if most[c] >= _SEEN * self.longest), key=lambda c: -most[c])
        self.parts = [("GPU work", [row.step_s - row.exposed_wait_s for row in rows])]
        self.parts += [(cause, [w.get(cause, 0.0) for w in waits]) for cause in seen]
        # Causes too small to see are summed up, so that the legend stays short and the bar complete.
        rest = [row.exposed_wait_s - sum(w.get(c, 0.0) for c in seen) for row, w in zip(rows, waits, strict=True)]
        if max(rest) >= _SEEN * self.longest:
            self.parts.append(("other", rest))
        self.labels = [_label(row) for row in rows]
        causes = [what for what, _ in self.parts[1:]]
        own = sorted(what for what in causes if what not in _HATCHES)
        extra = {cause: _EXTRA_HATCHES[i % len(_EXTRA_HATCHES)] for i, cause in enumerate(own)}
        tints = cause_colours(causes)
        self.hatching = {what: (tints[what][0], *(_HATCHES.get(what) or extra[what])) for what in causes}
        self.names = {what: f"exposed wait: {what}" if what in self.hatching else what for what, _ in self.parts}


class Panel:
    """One sweep: the positions of its values on a linear axis, and a line for each policy.

    Attributes:
        knob: its name.
        places: position of each value on the x axis: log2 of it, or its index for mini-batches.
        words: each value as text.
        unit: the x axis's label.
        lines: one for each policy.
        highest: seconds per step of the highest point.
        gap: the smallest distance between two places.
        range: (low, high) of the x axis.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.knob = sweep.knob
        even = sweep.knob == "mini_batches"
        self.places = [float(i) if even else math.log2(v) for i, v in enumerate(sweep.values)]
        self.words = [f"{v:,.10g}" for v in sweep.values]
        self.unit = _KNOBS.get(sweep.knob, sweep.knob) + ("" if even else " (log2)")
        columns = list(zip(*sweep.rows, strict=True))
        self.lines = [
            PolicyLine(c[0].policy, [r.step_s for r in c], [r.lower_bound_step_s for r in c], list(c)) for c in columns
        ]
        self.highest = max(y for line in self.lines for y in (*line.times, *line.bounds)) or 1.0
        self.gap = min((b - a for a, b in pairwise(self.places)), default=1.0) or 1.0
        pad = 0.05 * (self.places[-1] - self.places[0]) or 0.5
        self.range = (self.places[0] - pad, self.places[-1] + pad)

    def beside(self, inches: float) -> list[list[float]]:
        """Returns the x positions of each line's markers, side by side where they would hide each other.

        Args:
            inches: width of the panel.
        """
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

    def labelled(self, inches: float) -> list[int]:
        """Returns the indices of the values whose labels fit below a panel, preferring the last ones.

        Args:
            inches: width of the panel.
        """
        inch = inches / (self.range[1] - self.range[0])
        shown: list[int] = []
        for i in reversed(range(len(self.places))):
            if shown:
                room = 0.045 * (len(self.words[i]) + len(self.words[shown[-1]])) + 0.08
                if (self.places[shown[-1]] - self.places[i]) * inch < room:
                    continue
            shown.append(i)
        return shown[::-1]

    @property
    def crowded(self) -> bool:
        """True if any markers stand side by side."""
        return any(at != self.places for at in self.beside(WIDTH))

    def same(self, a: float, b: float) -> bool:
        """True if two times are too close to be distinguished in the drawing."""
        return abs(a - b) < _SEEN * self.highest

    def bounds(self) -> dict[str, list[list[tuple[float, float]]]]:
        """Returns the lower bounds to draw: policy -> lines of (x, y); key "" holds bounds that policies share.

        Policies may share a bound over part of the range only, so each interval between two values is handled alone.
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
                    # Continue a line where possible: a new one would restart its dashes at each value.
                    if line[-1][0] == begin[0] and self.same(line[-1][1], begin[1]):
                        line.append(end)
                        break
                else:
                    lines.append([begin, end])
        return found


def seconds_of(value: float) -> str:
    """Returns seconds as text, as beside a bar."""
    return f"{value:,.1f} s" if value >= 10 else f"{figure(value, 3)} s"


def change_of(row: Prediction) -> str:
    """Returns a policy's change against baseline as text, ``−16.0%``."""
    return f"{row.change:+.1%}".replace("-0.0%", "+0.0%").replace("-", "−")


def _label(row: Prediction) -> str:
    # Baseline is the reference, so its own change is left out, and so is that of a log, which has none.
    return seconds_of(row.step_s) + ("" if row.policy in _UNCHANGED else f"  ({change_of(row)})")


def styles_of(panels: Iterable[Panel]) -> dict[str, Style]:
    """Returns the style of each policy, the same in all panels."""
    names = list(dict.fromkeys(line.policy for panel in panels for line in panel.lines))
    own = [n for n in names if n not in _POLICIES]
    looks = {**_POLICIES, **{name: _EXTRA[i % len(_EXTRA)] for i, name in enumerate(own)}}
    return {name: Style(*looks[name], 3.4 - 1.8 * i / max(1, len(names) - 1)) for i, name in enumerate(names)}
