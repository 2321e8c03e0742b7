"""Colours and styles that the timeline, the plan and the graphs share, and how a figure is written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.files import replaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish; stages of one role share a hue, light and dark.
COLOURS = {
    "samples": ("#0072B2",),
    "requests": ("#8C6D1F",),
    "collects": ("#E69F00",),
    "trains": ("#D55E00", "#B3461F"),
    "syncs": ("#E3B7CF", "#C06A9B"),
    "validates": ("#56B4E9", "#B5DDF5", "#8CA9BD"),
    "saves": ("#7A7A7A", "#A8A8A8", "#C9C9C9"),
}
"""Colours of the stages with a role: the first such stage has the first one."""

OTHERS = (
    "#009E73", "#7CCFB0", "#4D4D4D", "#6A51A3", "#B2912F", "#117733", "#882255", "#44AA99", "#999933", "#332288",
    "#AA4466",
)  # fmt: skip
"""Colours of the other stages, in turn."""

HATCHED: dict[str, Any] = {"facecolor": "#F4F4F4", "edgecolor": "#8A8A8A", "hatch": "////", "linewidth": 0}
"""An exposed wait: keyword arguments of a matplotlib patch."""
CAUSES = {
    "rewards": ("#FBE3AE", "#54420F"),
    "controller": ("#E3DAF0", "#403454"),
    "dispatch": ("#D5E8DC", "#24432C"),
    "weights": ("#F3D6E4", "#56293F"),
    "io": ("#DCE6F2", "#293B50"),
    "start-up": ("#F4F4F4", "#2E2E2E"),
    "other": ("#F4F4F4", "#2E2E2E"),
}
"""Colours under the hatching of a wait, by its cause: in the light, in the dark."""
_OTHER_CAUSES = (("#F2D9D2", "#52322A"), ("#E2E5C4", "#3F4220"), ("#D3E6E9", "#233F43"))
INK = "#222222"
PIXELS = 100
"""Pixels per inch."""
WIDTH = 14.0
"""Width of a picture, in inches."""


def colours(stages: Iterable[str], roles: Mapping[str, str]) -> dict[str, str]:
    """Returns a colour for each stage, given in the order of the pipeline, and the roles of those that have one."""
    taken: dict[str, int] = {}
    found: dict[str, str] = {}
    for stage in dict.fromkeys(stages):
        role = roles.get(stage, "")
        palette = COLOURS.get(role, OTHERS)
        key = role if role in COLOURS else ""
        found[stage] = palette[taken.get(key, 0) % len(palette)]
        taken[key] = taken.get(key, 0) + 1
    return found


def cause_colours(causes: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Returns the colours of waits by cause, each as (light, dark); those without one of their own share some."""
    names = list(dict.fromkeys(causes))
    own = sorted(name for name in names if name not in CAUSES)
    extra = {name: _OTHER_CAUSES[i % len(_OTHER_CAUSES)] for i, name in enumerate(own)}
    return {name: CAUSES.get(name) or extra[name] for name in names}


def contrast(colour: str) -> str:
    """Returns "black" or "white", whichever is easier to read on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"


def columns_that_fit(words: Sequence[str], inches: float) -> int:
    """Returns the largest number of legend columns, up to 8, that fits a width."""
    widest = max(map(len, words), default=0) * 0.09 + 0.45
    return max(1, min(8, len(words), int(inches / widest)))


def save(figure: Figure, target: Path, kind: str) -> None:
    """Writes a figure atomically as ``png`` or ``svg``; the same figure gives the same file."""
    import matplotlib

    # No date and fixed ids make the file reproducible.
    quiet = {"Date": None} if kind == "svg" else {"Software": None}
    look = {"svg.hashsalt": "dataflow", "svg.fonttype": "none", "hatch.linewidth": 0.8}
    with replaced(target) as temporary, matplotlib.rc_context(look):
        figure.savefig(temporary, format=kind, dpi=PIXELS, metadata=quiet)
