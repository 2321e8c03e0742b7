"""The plan as an interactive page: the bars and panels of `dataflow.planning.drawing.chart`, drawn with bokeh."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflow.drawing.page import (
    BUTTONS,
    FAINT,
    INK,
    LINE,
    QUIET_FOCUS,
    TOOLS,
    bokeh_scripts,
    embedded,
    read_embedded,
    renumbered,
    shell,
)
from dataflow.drawing.style import HATCHED, WIDTH, cause_colours, columns_that_fit
from dataflow.planning.drawing.chart import (
    BESIDE,
    BOUND,
    GPU,
    Bars,
    Panel,
    PolicyLine,
    Style,
    change_of,
    seconds_of,
    styles_of,
)

if TYPE_CHECKING:
    from bokeh.models import CheckboxButtonGroup
    from bokeh.plotting import figure

    from dataflow.planning.drawing.words import Words

_HINT = "Point at a bar for its numbers. The tools at the right of a chart zoom and move it."
_HINT_OF_SWEEPS = "Point at a marker for its numbers, too. A button switches a policy off in all panels."
_LEAST = 360  # pixels: a sweep's chart is not squeezed below this width
_TIP = '<div style="max-width: 34em; font: 12px/1.45 system-ui, sans-serif">@hover{safe}</div>'
_SWITCH = "groups.forEach((group, i) => group.forEach((model) => { model.visible = cb_obj.active.includes(i) }))"
_START = """
// Labels of bars have a fixed width in pixels: the axis ends where the longest bar leaves room for its label.
function fitted(doc) {
  const bars = doc.get_model_by_name("bars"), ends = doc.get_model_by_name("bar-ends").data
  const legend = doc.get_model_by_name("legend"), columns = legend.ncols
  const pen = document.createElement("canvas").getContext("2d")
  const widest = (texts, font) => { pen.font = font; return texts.map((text) => pen.measureText(text).width) }
  const labels = widest(ends.text, "13px Helvetica, Arial, sans-serif")
  const longest = Math.max(...widest(legend.items.map((item) => item.label.value), "12px Helvetica, Arial, sans-serif"))
  const fit = () => {
    const wide = bars.inner_width
    if (!(wide > 0)) return
    const needed = ends.x.map((x, i) => x * wide / Math.max(wide / 3, wide - labels[i] - 14))
    bars.x_range.end = Math.max(...needed, 1.02 * Math.max(...ends.x)) || 1
    legend.ncols = Math.max(1, Math.min(columns, Math.floor(wide / (longest + 50))))
  }
  fit()
  bars.properties.inner_width.change.connect(fit)
}

async function start(item, themed) {
  await Bokeh.embed.embed_item(item, "plan")
  const doc = Bokeh.documents[Bokeh.documents.length - 1]
  const dark = matchMedia("(prefers-color-scheme: dark)")
  const theme = () => {
    for (const [name, property, light, darker] of themed) {
      doc.get_model_by_name(name)[property] = dark.matches ? darker : light
    }
  }
  theme()
  dark.addEventListener("change", theme)
  fitted(doc)
  quietFocus(document.getElementById("plan"))
  document.documentElement.dataset.ready = "yes"
}
"""


def page(bars: Bars, panels: Sequence[Panel], title: str, words: Words | None = None) -> str:
    """Returns the page: one HTML file that loads nothing; the same plan gives the same text.

    Args:
        bars: the policies' time per step.
        panels: one per sweep.
        title: over the page; none if empty.
        words: the text around the drawing; none by default.
    """
    from bokeh.embed import json_item
    from bokeh.layouts import column, row
    from bokeh.models import InlineStyleSheet

    across = (len(panels) if len(panels) <= 3 else 2) or 1
    styles = styles_of(panels)
    charts = _Charts()
    rows: list[Any] = [charts.bars(bars)]
    figures = [charts.sweep(panel, styles, WIDTH / across) for panel in panels]
    if figures:
        rows.append(charts.switches(styles))
    for at in range(0, len(figures), across):
        # On a narrow screen they stand below each other.
        wrapped = InlineStyleSheet(css=":host { flex-wrap: wrap; }")
        rows.append(row(*figures[at : at + across], sizing_mode="stretch_width", stylesheets=[wrapped]))
    item: Any = renumbered(json_item(column(*rows, sizing_mode="stretch_width")))
    body = (f"<h1>{html.escape(title)}</h1>\n" if title else "") + (words.above() if words else "")
    hint = f"{_HINT} {_HINT_OF_SWEEPS}" if panels else _HINT
    body += f'<div id="plan"></div><p class="hint">{hint}</p>'
    if any(panel.crowded for panel in panels):
        body += f'<p class="hint">{html.escape(BESIDE.capitalize())}.</p>'
    body += words.below() if words else ""
    data = f"\n{embedded('item', item)}\n{embedded('themed', charts.themed)}\n"
    start = f"start({read_embedded('item')}, {read_embedded('themed')})"
    return shell(title or "plan", body, f"{data}{bokeh_scripts()}\n<script>{QUIET_FOCUS}{_START}{start}\n</script>")


class _Charts:
    """The figures of one page.

    Attributes:
        themed: (model, property, light, dark) of each colour that differs between light and dark.
        groups: what each switch shows and hides, by the switch's label.
    """

    def __init__(self) -> None:
        self.themed: list[tuple[str, str, str, str]] = []
        self.groups: dict[str, list[Any]] = {}

    def bars(self, bars: Bars) -> figure:
        """Returns the chart of what each policy's step consists of."""
        from bokeh.models import ColumnDataSource, FixedTicker, Legend, LegendItem, PlainText, Range1d

        count = len(bars.rows)
        names = [str(name) for name in (*bars.names.values(), "lower bound")]
        columns = columns_that_fit(names, WIDTH - 3)
        height = 40 * count + 130 + 24 * -(-len(names) // columns)
        made = self._figure("bars", "predicted time per step, and its change against baseline", height)
        made.x_range, made.y_range = Range1d(0, bars.longest * 1.2), Range1d(count - 0.5, -0.5)
        whole = [
            f"{seconds_of(row.step_s)} a step, {change_of(row)} against baseline<br>"
            f"lower bound {seconds_of(bound)} ({html.escape(row.bound_by)})"
            for row, bound in zip(bars.rows, bars.bounds, strict=True)
        ]
        items: list[LegendItem] = []
        tints = cause_colours(bars.hatching)
        left = [0.0] * count
        for what, seconds in bars.parts:
            look: dict[str, Any] = {"fill_color": GPU}
            if what in bars.hatching:
                tint, _, pattern = bars.hatching[what]
                look = {"fill_color": tint, "hatch_pattern": pattern, "hatch_color": HATCHED["edgecolor"]}
                look |= {"hatch_scale": 7, "hatch_weight": 1}
            label = bars.names[what]
            hover = [
                f"<b>{html.escape(row.policy)}</b><br>{html.escape(label)}: {seconds_of(s)}<br>{facts}"
                for row, s, facts in zip(bars.rows, seconds, whole, strict=True)
            ]
            right = [a + s for a, s in zip(left, seconds, strict=True)]
            data = {"y": list(range(count)), "left": left, "right": right, "seconds": seconds, "hover": hover}
            bar = made.hbar(y="y", left="left", right="right", height=0.62, source=ColumnDataSource(data),
                            line_color=None, muted_alpha=0.1, name=f"bar-{label}", **look)  # fmt: skip
            if what in bars.hatching:
                self._theme(bar.glyph, f"wait-{label}", fill_color=tints[what],
                            hatch_color=(HATCHED["edgecolor"], "#8F8F8F"))  # fmt: skip
            self._hover(made, bar)
            items.append(LegendItem(label={"value": label}, renderers=[bar]))
            left = right
        marks = made.segment(x0=bars.bounds, x1=bars.bounds, y0=[at - 0.44 for at in range(count)],
                             y1=[at + 0.44 for at in range(count)], line_width=2.5, line_dash=[4, 3],
                             line_color="#6F6F6F")  # fmt: skip
        items.append(LegendItem(label={"value": "lower bound"}, renderers=[marks]))
        ends = [max(row.step_s, bound) for row, bound in zip(bars.rows, bars.bounds, strict=True)]
        source = ColumnDataSource({"x": ends, "y": list(range(count)), "text": bars.labels}, name="bar-ends")
        texts = made.text("x", "y", "text", source=source, x_offset=8, text_baseline="middle",
                          text_font_size="13px")  # fmt: skip
        self._theme(texts.glyph, "labels", text_color=INK)
        # Plain text: bokeh would set a name between dollar signs as TeX.
        made.yaxis.ticker = FixedTicker(ticks=list(range(count)))
        made.yaxis.major_label_overrides = {at: PlainText(text=row.policy) for at, row in enumerate(bars.rows)}
        made.yaxis.update(major_tick_in=0, major_tick_out=0)
        made.ygrid.visible = False
        made.xaxis.axis_label = "seconds a step"
        legend = Legend(items=items, location="left", orientation="horizontal", ncols=columns, click_policy="mute",
                        border_line_color=None, background_fill_color=None, label_text_font_size="12px", margin=0,
                        spacing=14,
                        padding=4)  # fmt: skip
        made.add_layout(legend, "below")
        self._theme(legend, "legend", label_text_color=INK)
        return made

    def sweep(self, panel: Panel, styles: Mapping[str, Style], inches: float) -> figure:
        """Returns the chart of one sweep: a line and markers for each policy, dashes for the lower bounds."""
        from bokeh.models import ColumnDataSource, FixedTicker, PlainText, Range1d

        made = self._figure(f"sweep-{panel.knob}-{len(self.themed)}", panel.knob, 400)
        made.min_width = _LEAST
        made.x_range, made.y_range = Range1d(*panel.range), Range1d(0, panel.highest * 1.06)
        for line in panel.lines:
            style = styles[line.policy]
            stroke = made.line(panel.places, line.times, line_color=style.colour, line_width=style.thickness * 1.3)
            self.groups.setdefault(line.policy, []).append(stroke)
        for name, lines in sorted(panel.bounds().items()):
            xs, ys = ([[point[axis] for point in points] for points in lines] for axis in (0, 1))
            colour = styles[name].colour if name else BOUND
            dashes = made.multi_line(xs, ys, line_color=colour, line_width=2, line_dash=[5, 4])
            self.groups.setdefault(_bound(name), []).append(dashes)
        for line, places in zip(panel.lines, panel.beside(inches), strict=True):
            style = styles[line.policy]
            hover = [_facts(panel, line, at) for at in range(len(places))]
            data = {"x": places, "y": line.times, "hover": hover}
            markers = made.scatter("x", "y", source=ColumnDataSource(data), marker=style.symbol,
                                   size=style.pixels, fill_color=style.colour, line_color="white",
                                   name=f"markers-{line.policy}")  # fmt: skip
            self.groups[line.policy].append(markers)
            self._hover(made, markers)
        shown = panel.labelled(inches)
        made.xaxis.ticker = FixedTicker(ticks=[panel.places[at] for at in shown])
        made.xaxis.major_label_overrides = {panel.places[at]: PlainText(text=panel.words[at]) for at in shown}
        made.xaxis.axis_label, made.yaxis.axis_label = panel.unit, "predicted seconds a step"
        return made

    def switches(self, styles: Mapping[str, Style]) -> CheckboxButtonGroup:
        """Returns the legend of all panels: a button for each policy and each lower bound."""
        from bokeh.models import CheckboxButtonGroup, CustomJS, InlineStyleSheet

        labels = [*styles, *(name for name in (_bound(n) for n in ("", *styles)) if name in self.groups)]
        buttons = CheckboxButtonGroup(
            name="policies",
            labels=labels,
            active=list(range(len(labels))),
            stylesheets=[InlineStyleSheet(css=BUTTONS + _marks(labels, styles))],
            sizing_mode="stretch_width",
            margin=(20, 5, 5, 5),
        )
        groups = [self.groups[label] for label in labels]
        buttons.js_on_change("active", CustomJS(args={"groups": groups}, code=_SWITCH))
        return buttons

    def _figure(self, name: str, title: str, height: int) -> figure:
        from bokeh.models import BasicTickFormatter, InlineStyleSheet, PlainText, Title
        from bokeh.plotting import figure

        made = figure(
            name=name,
            title=Title(text=PlainText(text=title), text_font_size="14px"),
            height=height,
            sizing_mode="stretch_width",
            tools="pan,box_zoom,wheel_zoom,save,reset",
            active_drag="box_zoom",
            toolbar_location="right",
            background_fill_color=None,
            border_fill_color=None,
            outline_line_color=None,
        )
        made.toolbar.update(logo=None, stylesheets=[InlineStyleSheet(css=TOOLS)])
        self._theme(made.title, f"{name}-title", text_color=INK)
        for axis, side in ((made.xaxis[0], "x"), (made.yaxis[0], "y")):
            axis.formatter = BasicTickFormatter(use_scientific=False)
            axis.update(minor_tick_line_color=None, axis_label_text_font_style="normal",
                        axis_label_text_font_size="12px", major_label_text_font_size="12px")  # fmt: skip
            self._theme(axis, f"{name}-{side}", axis_label_text_color=FAINT, major_label_text_color=INK,
                        major_tick_line_color=FAINT, axis_line_color=FAINT)  # fmt: skip
        for grid, side in ((made.xgrid[0], "x"), (made.ygrid[0], "y")):
            self._theme(grid, f"{name}-{side}-grid", grid_line_color=LINE)
        return made

    def _hover(self, made: figure, renderer: Any) -> None:
        from bokeh.models import HoverTool

        # `hover` is HTML, in which all names are escaped.
        tips = HoverTool(renderers=[renderer], tooltips=_TIP, point_policy="follow_mouse", visible=False)
        made.add_tools(tips)

    def _theme(self, model: Any, name: str, **colours: tuple[str, str]) -> None:
        model.name = name
        for attribute, (light, dark) in colours.items():
            if getattr(model, attribute) is None:
                continue
            setattr(model, attribute, light)
            self.themed.append((name, attribute, light, dark))


def _bound(policy: str) -> str:
    return f"lower bound of {policy}" if policy else "lower bound"


def _marks(labels: Iterable[str], styles: Mapping[str, Style]) -> str:
    """Returns the style sheet of the switches' marks: the policies' markers, dashes for the lower bounds."""
    rules = []
    bounds = {_bound(name): style.colour for name, style in styles.items()}
    for i, label in enumerate(labels, start=1):
        if label in styles:
            style = styles[label]
            rule = f'content: "{style.sign}"; color: {style.colour}; font-size: 15px; line-height: 12px;'

        else:
            colour = bounds.get(label, BOUND)
            rule = f"width: 20px; height: 0; border-top: 2px dashed {colour}; border-radius: 0; vertical-align: 4px;"

        rules.append(f".bk-btn:nth-child({i})::before {{ {rule} }}\n")
    return "".join(rules)


def _facts(panel: Panel, line: PolicyLine, at: int) -> str:
    row = line.rows[at]
    return (
        f"<b>{html.escape(line.policy)}</b>, {html.escape(panel.knob)} = {panel.words[at]}<br>"
        f"{seconds_of(row.step_s)} a step, {change_of(row)} against baseline<br>"
        f"lower bound {seconds_of(line.bounds[at])} ({html.escape(row.bound_by)})"
    )
