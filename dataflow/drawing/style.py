"""Colours and styles that the timeline, the plan and the graphs share, and how a figure is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.files import replaced

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can distinguish; related stages share a hue, light and dark.
COLOURS = {
    "rollout": "#0072B2",
    "old_log_prob": "#009E73",
    "ref_log_prob": "#7CCFB0",
    "actor_update": "#D55E00",
    "gather_weights": "#E3B7CF",
    "sync_weights": "#C06A9B",
    "reward_request": "#8C6D1F",
    "reward_collect": "#E69F00",
    "advantage": "#4D4D4D",
    "val_rollout": "#56B4E9",
    "val_score": "#B5DDF5",
}
_SPARE = ("#6A51A3", "#B2912F", "#117733", "#882255", "#44AA99", "#999933", "#332288", "#AA4466")
HATCHED: dict[str, Any] = {"facecolor": "#F4F4F4", "edgecolor": "#8A8A8A", "hatch": "////", "linewidth": 0}
"""An exposed wait: keyword arguments of a matplotlib patch."""
INK = "#222222"
PIXELS = 100
"""Pixels per inch."""
WIDTH = 14.0
"""Width of a picture, in inches."""


def colours(stages: Iterable[str]) -> dict[str, str]:
    """Returns a colour for each stage; user-defined stages get spare colours, in the order of their names."""
    stages = list(stages)
    own = sorted(s for s in stages if s not in COLOURS)
    spare = {stage: _SPARE[i % len(_SPARE)] for i, stage in enumerate(own)}
    return {stage: COLOURS.get(stage) or spare[stage] for stage in stages}


def contrast(colour: str) -> str:
    """Returns "black" or "white", whichever is easier to read on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"


def columns_that_fit(words: Sequence[str], inches: float) -> int:
    """Returns the largest number of legend columns, up to 8, that fits a width; columns are filled one by one."""
    for columns in range(8, 1, -1):
        rows = -(-len(words) // columns)
        wide = sum(max(map(len, words[i : i + rows])) * 0.09 + 0.45 for i in range(0, len(words), rows))
        if wide <= inches:
            return columns
    return 1


def save(figure: Figure, target: Path, kind: str) -> None:
    """Writes a figure atomically as ``png`` or ``svg``; the same figure gives the same file."""
    import matplotlib

    # No date and fixed ids make the file reproducible.
    quiet = {"Date": None} if kind == "svg" else {"Software": None}
    look = {"svg.hashsalt": "dataflow", "svg.fonttype": "none", "hatch.linewidth": 0.8}
    with replaced(target) as temporary, matplotlib.rc_context(look):
        figure.savefig(temporary, format=kind, dpi=PIXELS, metadata=quiet)
