"""Colours of the page's chart and its switches, in the light and in the dark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dataflow.drawing.page import FAINT, INK, LINE
from dataflow.drawing.style import HATCHED, cause_colours
from dataflow.timeline.page.tracks import Sheet

PATH = "#E0007A"
"""Colour of the critical path; no stage has it."""
# model, property: in the light, in the dark
THEMED: dict[tuple[str, str], tuple[str, str]] = {
    ("seconds", "axis_label_text_color"): FAINT,
    ("seconds", "major_label_text_color"): FAINT,
    ("seconds", "major_tick_line_color"): FAINT,
    ("seconds", "axis_line_color"): FAINT,
    ("resources", "major_label_text_color"): INK,
    ("grid", "grid_line_color"): LINE,
    ("wait-glyph", "hatch_color"): (HATCHED["edgecolor"], "#8F8F8F"),
    ("request-glyph", "line_color"): ("#5C4300", "#FFE9B0"),
    ("lead-glyph", "line_color"): ("#5C4300", "#FFE9B0"),
    ("arrow-glyph", "fill_color"): ("#5C4300", "#FFE9B0"),
    ("step-glyph", "line_color"): ("#777777", "#9A9A9A"),
    ("number-glyph", "text_color"): FAINT,
    ("gap-glyph", "text_color"): INK,
    ("downtime-edge-glyph", "line_color"): FAINT,
    ("downtime-glyph", "line_color"): ("#FFFFFF", "#161616"),
    ("downtime-label-glyph", "text_color"): INK,
    ("window", "fill_color"): ("#0072B2", "#9CCBEA"),
    ("window", "line_color"): ("#0072B2", "#9CCBEA"),
}
BAND = ("#F6D58D", "#84651C")
"""Rewards in flight."""
_GREY = {"#4D4D4D": "#8C8C8C"}
"""Stage colours that are too dark for a dark page, and their replacements."""


SLIDER = """
:host, .bk-slider-title { color: var(--ink, #222); font: 12.5px system-ui, sans-serif; }
"""


def _mixed(colour: str, other: int, share: float) -> str:
    """Returns a colour mixed with a share of black (0) or white (255)."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part * (1 - share) + other * share):02x}" for part in parts)


def palettes(palette: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Returns fill and edge colours of bars, each as (light, dark); a bar of one pixel shows its edge only."""
    fills = [_GREY.get(colour, colour) for colour in palette]
    return {
        "fills": (list(palette), fills),
        "edges": ([_mixed(c, 0, 0.32) for c in palette], [_mixed(c, 255, 0.3) for c in fills]),
    }


_HATCH = "repeating-linear-gradient(135deg, {} 0 2px, {} 2px 4px)"
MARKS = f"""
.bk-btn:nth-child(1)::before {{ background: {_HATCH.format("#f4f4f4", "#8a8a8a")}; }}
.bk-btn:nth-child(2)::before {{ background: {BAND[0]}; }}
@media (prefers-color-scheme: dark) {{
  .bk-btn:nth-child(1)::before {{ background: {_HATCH.format("#2e2e2e", "#8f8f8f")}; }}
  .bk-btn:nth-child(2)::before {{ background: {BAND[1]}; }}
}}
.bk-btn:nth-child(3)::before {{
  background: linear-gradient(var(--slow, #5C4300), var(--slow, #5C4300)) center / 100% 3px no-repeat; }}
.bk-btn:nth-child(4)::before {{ width: 0 !important; border-left: 2px dashed var(--faint, #666); border-radius: 0; }}
.bk-btn:nth-child(5)::before {{ border: 2px solid {PATH}; box-sizing: border-box; }}
.bk-btn:nth-child(6)::before {{ height: 0; border-top: 2px dashed var(--slow, #5C4300); vertical-align: 3px; }}
"""
"""Marks of the switches of layers."""


def themed(sheet: Sheet, palette: Sequence[str]) -> list[tuple[str, str, Any, Any]]:
    """Returns (model, property, light, dark) for every colour that depends on the theme."""
    own: dict[tuple[str, str], Any] = {(name, "palette"): both for name, both in palettes(palette).items()}
    own["causes", "palette"] = causes(sheet)
    for i in range(len(sheet.bands)):
        own |= {(f"band-glyph-{i}", "fill_color"): BAND, (f"most-{i}", "text_color"): INK}
    if len(sheet.names) > 1:
        own |= {(f"head-{i}", "text_color"): INK for i in range(len(sheet.names))}
    return [(*key, *value) for key, value in {**THEMED, **own}.items()]


def causes(sheet: Sheet) -> tuple[list[str], list[str]]:
    """Returns the colours of a sheet's causes of waits: in the light, in the dark."""
    found = cause_colours(sheet.causes or ["other"])
    return [light for light, _ in found.values()], [dark for _, dark in found.values()]
