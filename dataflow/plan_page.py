"""The plan as a page to look around in: the panels of `dataflow.plan_picture`, by plotly."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dataflow.plan_picture import BOUND, CAUSES, GPU, Bars, Line, Panel, change_of, seconds_of, styles_of
from dataflow.timeline.picture import HATCHED

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
    styles = styles_of(line.policy for panel in panels for line in panel.lines)
    _add_bars(figure, bars, inside)
    known: set[str] = set()
    for i, panel in enumerate(panels):
        _add_sweep(figure, panel, styles, (2 + i // across, 1 + i % across), known)
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
    figure.update_xaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    figure.update_yaxes(gridcolor="rgba(128,128,128,0.25)", zeroline=False)
    options = {"displaylogo": False, "responsive": True}
    # With an id of its own, the same plan gives the same file.
    body = to_html(figure, config=options, include_plotlyjs=True, full_html=False, div_id="plan")
    return _PAGE.format(title=html.escape(title or "plan"), figure=body)


def _heading(figure: go.Figure, row: int, column: int, text: str) -> None:
    figure.add_annotation(text=f"<b>{text}</b>", x=0, y=1, xref="x domain", yref="y domain", xanchor="left",
                          yanchor="bottom", yshift=6, showarrow=False, row=row, col=column)  # fmt: skip


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
        if what != "GPU work":
            tint, _, shape = CAUSES.get(what, CAUSES["other"])
            pattern = {"shape": shape, "fgcolor": HATCHED["edgecolor"], "bgcolor": tint, "size": 7, "solidity": 0.2}
            look = {"color": tint, "pattern": pattern}
        said = html.escape(bars.legend(what))
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
    figure.update_layout(legend2={"orientation": "h", "x": 0, "y": bottom - 52 / inside, "yanchor": "top"})


def _add_sweep(
    figure: go.Figure,
    panel: Panel,
    styles: Mapping[str, tuple[str, str, str, float]],
    at: tuple[int, int],
    known: set[str],
) -> None:
    import plotly.graph_objects as go

    row, column = at

    def add(name: str, **facts: Any) -> None:
        figure.add_trace(
            go.Scatter(name=html.escape(name), legendgroup=name, showlegend=name not in known, **facts),
            row=row,
            col=column,
        )
        known.add(name)

    for line in panel.lines:
        colour, _, symbol, size = styles[line.policy]
        marker = {"symbol": symbol, "size": 7 + 10 * size, "line": {"color": "white", "width": 1}}
        stroke = {"color": colour, "width": 1.6 + 4 * size}
        hover = [_hover(panel, line, i) for i in range(len(panel.places))]
        add(line.policy, x=panel.places, y=line.times, mode="lines+markers", line=stroke, marker=marker,
            hovertext=hover, hoverinfo="text", cliponaxis=False)  # fmt: skip
    for name, lines in sorted(panel.bounds().items()):
        points = [p for points in lines for p in (*points, (None, None))]
        stroke = {"color": styles[name][0] if name else BOUND, "width": 2, "dash": "5px,4px"}
        add(f"lower bound of {name}" if name else "lower bound", x=[x for x, _ in points], y=[y for _, y in points],
            mode="lines", line=stroke, hoverinfo="skip")  # fmt: skip
    _heading(figure, row, column, html.escape(panel.knob))
    ticks = {"tickvals": panel.places, "ticktext": panel.words, "title": html.escape(panel.unit)}
    figure.update_xaxes(range=list(panel.range), **ticks, row=row, col=column)
    title = "predicted seconds a step"
    figure.update_yaxes(range=[0, panel.highest * 1.06], title=title, tickformat=",~g", row=row, col=column)


def _hover(panel: Panel, line: Line, at: int) -> str:
    """What is said at a point, for all policies that have theirs there: only the uppermost can be pointed at."""
    here = [html.escape(o.policy) for o in panel.lines if panel.same(o.times[at], line.times[at])]
    row = line.rows[at]
    return (
        f"<b>{', '.join(here)}</b><br>{html.escape(panel.knob)} = {panel.words[at]}<br>"
        f"{seconds_of(row.step_s)} a step, {change_of(row)} against baseline<br>"
        f"lower bound of {html.escape(line.policy)}: {seconds_of(line.bounds[at])} ({html.escape(row.bound_by)})"
    )
