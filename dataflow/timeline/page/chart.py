"""The chart of the page: bokeh's figures and widgets, drawn from the columns of a sheet. ``page.js`` updates them.

Models used by the script have names; ``looks.py`` lists the colours that differ between light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflow.drawing.page import BUTTONS, TOOLS
from dataflow.drawing.style import contrast
from dataflow.timeline.downtime import CUT
from dataflow.timeline.page.looks import MARKS, PATH, SLIDER, causes, palettes, themed
from dataflow.timeline.page.tracks import Columns, Sheet

if TYPE_CHECKING:
    from bokeh.models import LayoutDOM
    from bokeh.plotting import figure

_TYPES = {
    "float64": ("begin", "end", "at", "from_x", "to_x"),
    "float32": ("top", "bottom", "y", "from_y", "to_y", "idle", "version", "stale", "samples"),
    "int32": ("step", "group", "count"),
    "int16": ("stage", "part", "parts", "small", "cause_index"),
    "uint16": ("run",),
}
_COARSE = 2400  # bars in a row of the overview
_CUT = 9  # pixels for the band at a cut of the axis
_CROWDED = 1250  # bars, one to a pixel of a screen of usual width
_LATER = ("span", "request", "lead", "arrow", "step")
"""Glyphs hidden until the script has chosen which of them fit, so that they are drawn only once."""
_SOURCES = ("spans", "path", "waits", "requests", "steps")
_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names}

SHOWN = (
    "exposed waits",
    "rewards in flight",
    "slowest group of a mini-batch",
    "step ends",
    "critical path",
    "all arrows",
)
"""Layers that can be switched."""
_OFF = 2
"""The last layers, which are off at first. Without the last one, only the arrows of what is pointed at are shown."""
_TIP = """<div style="max-width: 34em; font: 12px/1.45 system-ui, sans-serif">
<b>@row{head}</b><div style="white-space: pre-wrap; tab-size: 28">@row{said}</div></div>"""


def chart(sheet: Sheet, colour: Mapping[str, str]) -> LayoutDOM:
    """Returns the chart, the overview below it, and below that the widgets that filter them.

    Args:
        sheet: the columns to draw.
        colour: stage -> colour.
    """
    from bokeh.layouts import column, row
    from bokeh.models import CDSView, CheckboxButtonGroup, ColumnDataSource, IndexFilter, InlineStyleSheet, RangeSlider

    sources = {name: ColumnDataSource(_arrays(getattr(sheet, name)), name=name) for name in _SOURCES}
    views = {name: CDSView(filter=IndexFilter(name=f"{name}-shown")) for name in sources}
    views["leads"] = CDSView(filter=IndexFilter(name="leads-shown", indices=[]))
    palette = [colour[stage] for stage in sheet.stages]
    main = _main(sheet, sources, views, palette)
    overview = _overview(sheet, sources["spans"], main)

    light, dark = (
        "".join(f".bk-btn:nth-child({i})::before {{ background: {c}; }}\n" for i, c in enumerate(fills, start=1))
        for fills in palettes(palette)["fills"]
    )
    chips = f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"
    stages = CheckboxButtonGroup(
        name="stages",
        labels=sheet.stages,
        active=list(range(len(sheet.stages))),
        stylesheets=[InlineStyleSheet(css=BUTTONS + chips)],
        sizing_mode="stretch_width",
    )
    shown = CheckboxButtonGroup(
        name="shown",
        labels=list(SHOWN),
        active=list(range(len(SHOWN) - _OFF)),
        stylesheets=[InlineStyleSheet(css=BUTTONS + MARKS + ":host { flex: 1 1 24rem; }")],
        sizing_mode="stretch_width",
    )
    switches: list[LayoutDOM] = [shown]
    first, last = min(sheet.spans["step"]), max(sheet.spans["step"])
    if first < last:
        switches.append(
            RangeSlider(name="steps-range", title="steps", start=first, end=last, value=(first, last), step=1,
                        format="0", width=320, margin=(0, 30, 0, 20),
                        stylesheets=[InlineStyleSheet(css=SLIDER)])
        )  # fmt: skip
    # On a narrow screen the slider takes a line of its own.
    wrapped = InlineStyleSheet(css=":host { flex-wrap: wrap; }")
    layers = row(*switches, sizing_mode="stretch_width", stylesheets=[wrapped])
    whole = column(main, overview, stages, layers, sizing_mode="stretch_width")
    named = {model.name: model for model in whole.references() if model.name}
    for name in _LATER:
        named[name].visible = False
    for name, attribute, in_the_light, _ in themed(sheet, palette):
        setattr(named[name], attribute, in_the_light)
    if _crowded(sheet):
        named["edges"].palette = palette
    return whole


def _crowded(sheet: Sheet) -> bool:
    """True if bars are about a pixel wide, so that edges would hide their fill; the script decides again on zooming."""
    return len(sheet.spans["begin"]) > _CROWDED


def _arrays(columns: Columns) -> dict[str, Any]:
    """Returns numeric columns as arrays, which bokeh encodes compactly; texts go to the script, see ``words``."""
    import numpy as np

    count = len(next(iter(columns.values())))
    return {"row": np.arange(count, dtype="int32")} | {
        name: np.asarray(values, dtype=_TYPE_OF[name]) for name, values in columns.items() if name in _TYPE_OF
    }


def _main(sheet: Sheet, sources: Mapping[str, Any], views: Mapping[str, Any], palette: Sequence[str]) -> figure:
    from bokeh.models import (
        BoxZoomTool,
        CustomJS,
        CustomJSHover,
        FixedTicker,
        HoverTool,
        InlineStyleSheet,
        Label,
        PanTool,
        PlainText,
        Range1d,
        ResetTool,
        TapTool,
        WheelZoomTool,
    )
    from bokeh.plotting import figure

    end = sheet.longest * 1.005 or 1.0
    zoom, pan = WheelZoomTool(dimensions="width"), PanTool(dimensions="width")
    box = BoxZoomTool(dimensions="width")
    made = figure(
        name="chart",
        height=round(sheet.height) + 58,
        sizing_mode="stretch_width",
        x_range=Range1d(0, end, bounds=(-0.02 * end, 1.02 * end), min_interval=1e-4, name="seconds-range"),
        y_range=Range1d(sheet.height, 0, name="pixels-range"),
        tools=[pan, box, zoom, ResetTool()],
        active_drag=pan,
        active_scroll=zoom,
        toolbar_location="right",
        lod_threshold=None,  # keep all bars while dragging
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color=None,
        min_border_left=76,
        x_axis_label="seconds from the first task" + (f"; {CUT}" if sheet.downtimes["at"] else ""),
    )
    made.toolbar.update(logo=None, stylesheets=[InlineStyleSheet(css=TOOLS)])
    middles = [(row.top + row.bottom) / 2 for row in sheet.rows]
    made.yaxis.update(
        name="resources",
        ticker=FixedTicker(ticks=middles),
        # Plain text: bokeh would set a name between dollar signs as TeX.
        major_label_overrides={m: PlainText(text=row.name) for m, row in zip(middles, sheet.rows, strict=True)},
        major_tick_line_color=None,
        axis_line_color=None,
        major_label_text_font_size="12.5px",
    )
    made.xaxis.update(name="seconds", minor_tick_line_color=None, axis_label_text_font_style="normal",
                      axis_label_text_font_size="12px")  # fmt: skip
    made.ygrid.visible = False
    made.xgrid.name = "grid"

    bars = _bars(made, sheet, sources, views, palette)
    for i, (name, at) in enumerate(zip(sheet.names, sheet.heads, strict=True)):
        if len(sheet.names) > 1:
            label = Label(name=f"head-{i}", x=0, x_units="screen", y=at, text=PlainText(text=name),
                          text_font_size="14px", text_font_style="bold", text_baseline="middle")  # fmt: skip
            made.add_layout(label)
    for i, (columns, most) in enumerate(zip(sheet.bands, sheet.most, strict=True)):
        text = PlainText(text=f"at most {most} in flight")
        label = Label(name=f"most-{i}", x=2, x_units="screen", y=columns["bottom"][0] - 2, text=text,
                      text_baseline="bottom", text_font_size="11px", text_alpha=0.75)  # fmt: skip
        made.add_layout(label)
    pointing = CustomJS(code="timeline.point(cb_data.renderer, cb_data.index)")
    for renderer in bars:
        # The script returns the text of a row; bokeh inserts it as text, never as markup.
        source = renderer.data_source
        formatter = CustomJSHover(args={"source": source}, code="return timeline.tell(source, format, value)")
        tips = HoverTool(renderers=[renderer], tooltips=_TIP, formatters={"@row": formatter}, callback=pointing,
                         point_policy="follow_mouse", visible=False)  # fmt: skip
        # A request lies on its band: keep their tooltips apart.
        tips.attachment = {"request": "above", "wait": "horizontal", "span": "horizontal"}.get(renderer.name, "below")
        made.add_tools(tips)
    # By inspection: a selection would make the other bars pale.
    asked = [renderer for renderer in bars if renderer.name == "request"]
    reading = CustomJS(code="timeline.read(cb_data.source)")
    made.add_tools(TapTool(renderers=asked, behavior="inspect", callback=reading, visible=False))
    return made


def _bars(
    made: figure, sheet: Sheet, sources: Mapping[str, Any], views: Mapping[str, Any], palette: Sequence[str]
) -> list[Any]:
    """Draws everything, from back to front; returns the renderers that have tooltips."""
    from bokeh.models import ColumnDataSource, LinearColorMapper

    edges = {"left": "begin", "right": "end", "top": "top", "bottom": "bottom"}
    fill, line = (
        {"field": "stage", "transform": LinearColorMapper(name=name, palette=light, low=-0.5, high=len(light) - 0.5)}
        for name, (light, _) in palettes(palette).items()
    )

    hoverable = []
    for i, (columns, most) in enumerate(zip(sheet.bands, sheet.most, strict=True)):
        source = ColumnDataSource(_arrays(columns), name=f"band-source-{i}", tags=[most])
        band = made.varea_step("begin", "bottom", "top", source=source, step_mode="after", name=f"band-{i}")
        band.glyph.name = f"band-glyph-{i}"
        # The area is drawn without seams; these invisible bars carry the tooltips.
        hoverable.append(made.quad(source=source, **edges, fill_color=None, line_color=None, name=f"band-spot-{i}"))
    ends_of = made.segment(x0="at", x1="at", y0="top", y1="bottom", source=sources["steps"], view=views["steps"],
                           line_dash=[4, 3], line_width=1.2, name="step")  # fmt: skip
    ends_of.glyph.name = "step-glyph"
    cause = {"field": "cause_index", "transform": LinearColorMapper(name="causes", palette=causes(sheet)[0], low=-0.5,
                                                            high=max(1, len(sheet.causes)) - 0.5)}  # fmt: skip
    waits = made.quad(source=sources["waits"], view=views["waits"], **edges, fill_color=cause, line_color=None,
                      hatch_scale=7, hatch_pattern="right_diagonal_line", hatch_weight=1, name="wait")  # fmt: skip
    waits.glyph.name = "wait-glyph"
    spans = made.quad(source=sources["spans"], view=views["spans"], **edges, fill_color=fill, line_color=line,
                      line_width=1, name="span")  # fmt: skip
    spans.glyph.name = "span-glyph"
    lead = made.segment(x0="end", y0="y", x1="to_x", y1="to_y", source=sources["requests"], view=views["leads"],
                        line_width=1.4, line_dash=[5, 3], name="lead")  # fmt: skip
    lead.glyph.name = "lead-glyph"
    arrow = made.scatter("to_x", "to_y", source=sources["requests"], view=views["leads"], marker="triangle",
                         size=7, line_color=None, name="arrow")  # fmt: skip
    arrow.glyph.name = "arrow-glyph"
    asked = made.segment(x0="begin", x1="end", y0="y", y1="y", source=sources["requests"], view=views["requests"],
                         line_width=3, name="request")  # fmt: skip
    asked.glyph.name = "request-glyph"
    link = made.segment(x0="from_x", y0="from_y", x1="begin", y1="y", source=sources["path"], view=views["path"],
                        line_color=PATH, line_width=2, visible=False, name="path-link")  # fmt: skip
    link.glyph.name = "path-link-glyph"
    path = made.quad(source=sources["path"], view=views["path"], **edges, fill_color=fill, line_color=PATH,
                     line_width=2.5, visible=False, name="path-span")  # fmt: skip
    path.glyph.name = "path-glyph"
    _texts(made)
    return [*hoverable, waits, spans, asked, _cuts(made, sheet)]


def _cuts(made: figure, sheet: Sheet) -> Any:
    """Draws a band of a fixed width over each cut; returns the renderer that has tooltips."""
    from bokeh.models import ColumnDataSource

    source = ColumnDataSource(_arrays(sheet.downtimes), name="downtimes")
    where = {"x0": "at", "x1": "at", "y0": "top", "y1": "bottom", "source": source}
    edge = made.segment(**where, line_width=_CUT, name="downtime-edge")
    edge.glyph.name = "downtime-edge-glyph"
    band = made.segment(**where, line_width=_CUT - 2, line_dash=[5, 2], name="downtime")
    band.glyph.name = "downtime-glyph"
    return band


def _texts(made: figure) -> None:
    """Adds labels of bars and numbers of steps; the script fills in those that fit."""
    from bokeh.models import ColumnDataSource

    empty = ColumnDataSource({"x": [], "y": [], "text": [], "ink": []}, name="labels")
    labels = made.text("x", "y", "text", source=empty, text_align="center", text_baseline="middle",
                       text_font_size="11px", text_color="ink", name="label")  # fmt: skip
    labels.glyph.name = "label-glyph"
    numbers = made.text("x", "y", "text", source=ColumnDataSource({"x": [], "y": [], "text": []}, name="numbers"),
                        text_align="right", text_baseline="middle", text_font_size="11px", name="number",
                        x_offset=-3)  # fmt: skip
    numbers.glyph.name = "number-glyph"
    gaps = made.text("x", "y", "text", source=ColumnDataSource({"x": [], "y": [], "text": []}, name="gaps"),
                     text_align="center", text_baseline="middle", text_font_size="11px", name="gap")  # fmt: skip
    gaps.glyph.name = "gap-glyph"
    cuts = made.text("x", "y", "text", source=ColumnDataSource({"x": [], "y": [], "text": []}, name="cuts"),
                     text_align="left", text_baseline="middle", text_font_size="11px", name="downtime-label",
                     x_offset=-_CUT / 2)  # fmt: skip
    cuts.glyph.name = "downtime-label-glyph"


def _overview(sheet: Sheet, spans: Any, main: figure) -> figure:
    """Returns a small chart of all GPU tasks, with the window that the main chart shows."""
    from bokeh.models import CDSView, IndexFilter, Range1d, RangeTool
    from bokeh.plotting import figure
    from bokeh.transform import dodge

    made = figure(
        name="overview",
        height=round(24 + sheet.high.stripe * sheet.stripes),
        sizing_mode="stretch_width",
        x_range=Range1d(0, main.x_range.end, name="all-seconds"),
        y_range=Range1d(sheet.stripes, -0.15),
        tools="",
        toolbar_location=None,
        lod_threshold=None,
        background_fill_color=None,
        border_fill_color=None,
        outline_line_color="#888888",
        min_border_left=76,
        min_border_right=30,
    )
    made.axis.visible = False
    made.grid.visible = False
    glyph = next(r for r in main.renderers if r.name == "span").glyph
    view = CDSView(filter=IndexFilter(_coarse(sheet)))
    made.quad(source=spans, view=view, left="begin", right="end", top="small", bottom=dodge("small", 0.85),
              line_color=None, fill_color=glyph.fill_color, name="stripe")  # fmt: skip
    tool = RangeTool(x_range=main.x_range)
    tool.overlay.update(name="window", fill_alpha=0.18, line_alpha=0.9, line_width=1.5)
    made.add_tools(tool)
    return made


def _coarse(sheet: Sheet) -> list[int]:
    """Returns the bars that the overview shows: one for each half pixel."""
    size = sheet.longest / _COARSE
    spans = sheet.spans
    reached: dict[int, float] = {}
    kept = []
    for i in sorted(range(len(spans["begin"])), key=spans["begin"].__getitem__):
        row, end = spans["small"][i], spans["end"][i]
        if row >= 0 and (row not in reached or end > reached[row] + size):
            kept.append(i)
            reached[row] = end
    return kept


def script_facts(sheet: Sheet, colour: Mapping[str, str], samples: Mapping[str, str]) -> dict[str, Any]:
    """Returns the JSON-serializable data that the page's script needs beside the models.

    Args:
        sheet: the columns that are drawn.
        colour: stage -> colour.
        samples: run -> address of the page of its samples, if there is one.
    """
    words = {
        source: {name: values for name, values in getattr(sheet, source).items() if name not in _TYPE_OF}
        for source in (*_SOURCES, "downtimes")
    }
    return {
        "runs": sheet.names,
        "samples": [samples.get(name, "") for name in sheet.names],
        "stages": sheet.stages,
        "causes": sheet.causes,
        "ink": [contrast(colour[stage]) for stage in sheet.stages],
        "longest": sheet.longest * 1.005 or 1.0,
        "bands": len(sheet.bands),
        "crowded": _crowded(sheet),
        "words": words,
        "themed": themed(sheet, [colour[stage] for stage in sheet.stages]),
    }
