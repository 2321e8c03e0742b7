"""The plan as a page to look around in: the panels of `dataflow.planning.picture`, by plotly."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflow.drawing.style import HATCHED, WIDTH
from dataflow.planning.picture import BESIDE, BOUND, GPU, Bars, Line, Panel, Style, change_of, seconds_of, styles_of

if TYPE_CHECKING:
    import plotly.graph_objects as go

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ margin: 1rem auto; max-width: 1400px; min-width: 720px; }}
@media (prefers-color-scheme: dark) {{ .main-svg > g:not(.hoverlayer) text {{ fill: #d0d0d0 !important; }} }}
</style>
</head>
<body>
{figure}
</body>
</html>
"""


def page(bars: Bars, panels: Sequence[Panel], title: str) -> str:
    import plotly.graph_objects as go
    from plotly.io import to_html
    from plotly.subplots import make_subplots

    across = (len(panels) if len(panels) <= 3 else 2) or 1
    down = -(-len(panels) // across)
    tall, gap, high = 40 * len(bars.rows) + 10, 150, 320  # pixels
    inside = tall + down * (gap + high)
    first: list[Any] = [{"colspan": across}, *[None] * (across - 1)]
    figure = make_subplots(
        rows=1 + down,
        cols=across,
        specs=[first, *([{}] * across for _ in range(down))],
        row_heights=[tall, *[high] * down],
        vertical_spacing=gap / inside if down else 0,
        horizontal_spacing=0.07,
    )
    styles = styles_of(panels)
    _add_bars(figure, bars, inside)
    known: set[str] = set()
    for i, panel in enumerate(panels):
        _add_sweep(figure, panel, styles, (2 + i // across, 1 + i % across), WIDTH / across, known)
    if any(panel.crowded for panel in panels):
        # A line of its own in the legend, that shows nothing but its name.
        figure.add_trace(
            go.Scatter(x=[None], y=[None], mode="markers", marker={"opacity": 0}, name=BESIDE), row=2, col=1
        )
    top = 90 if title else 50
    figure.update_layout(
        template="none",
        height=inside + top + (130 if panels else 110),
        margin={"l": 60, "r": 20, "t": top, "b": 130 if panels else 110},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13, "color": "#666666"},
        barmode="stack",
        hovermode="closest",
        hoverlabel={"align": "left"},
        legend={"orientation": "h", "x": 0, "y": -75 / inside, "yanchor": "top"},
    )
    if title:
        bold = f"<b>{html.escape(title)}</b>"
        figure.update_layout(title={"text": bold, "x": 0, "xanchor": "left", "xref": "paper", "y": 1, "yanchor": "top",
                                    "pad": {"t": 18}, "font": {"size": 18}})  # fmt: skip
    figure.update_xaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False, linecolor=BOUND, ticks="outside")
    figure.update_yaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    options = {"displaylogo": False, "responsive": True}
    # With an id of its own, the same plan gives the same file.
    body = to_html(figure, config=options, include_plotlyjs=True, full_html=False, div_id="plan")
    return _PAGE.format(title=html.escape(title or "plan"), figure=body)


def _heading(figure: go.Figure, row: int, column: int, text: str) -> None:
    where = {
        "x": 0,
        "xref": "x domain",
        "xanchor": "left",
        "y": 1,
        "yref": "y domain",
        "yanchor": "bottom",
        "yshift": 6,
    }
    figure.add_annotation(text=f"<b>{text}</b>", showarrow=False, row=row, col=column, **where)


def _add_bars(figure: go.Figure, bars: Bars, inside: int) -> None:
    import plotly.graph_objects as go

    names = [html.escape(row.policy) for row in bars.rows]
    count = len(names)
    whole = [
        f"{seconds_of(row.step_s)} a step, {change_of(row)} against baseline<br>"
        f"lower bound {seconds_of(bound)} ({html.escape(row.bound_by)})"
        for row, bound in zip(bars.rows, bars.bounds, strict=True)
    ]
    for what, seconds in bars.parts:
        look: dict[str, Any] = {"color": GPU}
        if what in bars.hatching:
            tint, _, shape = bars.hatching[what]
            pattern = {"shape": shape, "fgcolor": HATCHED["edgecolor"], "bgcolor": tint, "size": 7, "solidity": 0.2}
            look = {"color": tint, "pattern": pattern}
        said = html.escape(bars.names[what])
        hover = [f"<b>{n}</b><br>{said}: {seconds_of(s)}<br>{w}" for n, s, w in zip(names, seconds, whole, strict=True)]
        bar = go.Bar(x=seconds, y=list(range(count)), orientation="h", width=0.62, name=said, marker=look,
                     hovertext=hover, hoverinfo="text", legend="legend2")  # fmt: skip
        figure.add_trace(bar, row=1, col=1)
    xs: list[float | None] = []
    ys: list[float | None] = []
    for at, bound in enumerate(bars.bounds):
        xs += [bound, bound, None]
        ys += [at - 0.44, at + 0.44, None]
    line = {"color": "#6F6F6F", "width": 2.5, "dash": "4px,3px"}
    marks = go.Scatter(x=xs, y=ys, mode="lines", line=line, name="lower bound", hoverinfo="skip", legend="legend2")
    figure.add_trace(marks, row=1, col=1)
    for at, (row, label) in enumerate(zip(bars.rows, bars.labels, strict=True)):
        end = max(row.step_s, bars.bounds[at])
        figure.add_annotation(x=end, y=at, text=label, showarrow=False, xanchor="left", xshift=8, row=1, col=1)
    figure.update_xaxes(range=[0, bars.longest * 1.2], title="seconds a step", tickformat=",~g", row=1, col=1)
    ticks = {"tickvals": list(range(count)), "ticktext": names, "showgrid": False, "automargin": True}
    figure.update_yaxes(range=[count - 0.5, -0.5], ticksuffix=" ", **ticks, row=1, col=1)
    _heading(figure, 1, 1, "predicted time per step, and its change against baseline")
    bottom = figure.layout.yaxis.domain[0]
    figure.update_layout(legend2={"orientation": "h", "x": 0, "y": bottom - 56 / inside, "yanchor": "top"})


def _add_sweep(
    figure: go.Figure,
    panel: Panel,
    styles: Mapping[str, Style],
    at: tuple[int, int],
    inches: float,
    known: set[str],
) -> None:
    import plotly.graph_objects as go

    row, column = at

    def add(name: str, points: Iterable[tuple[float | None, float | None]], named: bool = True, **facts: Any) -> None:
        xs, ys = zip(*points, strict=True)
        shown = named and name not in known
        known.update([name] if named else [])
        line = go.Scatter(x=xs, y=ys, name=html.escape(name), legendgroup=name, showlegend=shown, **facts)
        figure.add_trace(line, row=row, col=column)

    for line in panel.lines:
        stroke = {"color": styles[line.policy].colour, "width": styles[line.policy].thickness * 1.3}
        points = zip(panel.places, line.times, strict=True)
        add(line.policy, points, named=False, mode="lines", line=stroke, hoverinfo="skip")
    for name, lines in sorted(panel.bounds().items()):
        dashes = {"color": styles[name].colour if name else BOUND, "width": 2, "dash": "5px,4px"}
        gaps = [p for points in lines for p in (*points, (None, None))]
        add(f"lower bound of {name}" if name else "lower bound", gaps, mode="lines", line=dashes, hoverinfo="skip")
    for line, places in zip(panel.lines, panel.beside(inches), strict=True):
        style = styles[line.policy]
        edge = {"color": "white", "width": 1}
        marker = {"color": style.colour, "symbol": style.symbol, "size": style.size * 1.3, "line": edge}
        hover = [_hover(panel, line, i) for i in range(len(places))]
        facts = {"mode": "markers", "marker": marker, "hovertext": hover, "hoverinfo": "text", "cliponaxis": False}
        add(line.policy, zip(places, line.times, strict=True), **facts)
    _heading(figure, row, column, html.escape(panel.knob))
    ticks = {"tickvals": panel.places, "ticktext": panel.words, "title": html.escape(panel.unit)}
    figure.update_xaxes(range=list(panel.range), **ticks, row=row, col=column)
    title = "predicted seconds a step"
    figure.update_yaxes(range=[0, panel.highest * 1.06], title=title, tickformat=",~g", row=row, col=column)


def _hover(panel: Panel, line: Line, at: int) -> str:
    row = line.rows[at]
    return (
        f"<b>{html.escape(line.policy)}</b>, {html.escape(panel.knob)} = {panel.words[at]}<br>"
        f"{seconds_of(row.step_s)} a step, {change_of(row)} against baseline<br>"
        f"lower bound {seconds_of(line.bounds[at])} ({html.escape(row.bound_by)})"
    )
