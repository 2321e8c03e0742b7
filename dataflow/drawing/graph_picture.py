"""Pictures of the graph: the stages of one step, or the tasks of several, as mermaid text, SVG or PNG.

The critical path is marked: the longest chain of dependent tasks, which no number of GPUs can shorten. Validation and
checkpoints are not on it, since training does not wait for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dataflow.drawing.layout import Point, layered
from dataflow.drawing.mermaid import CRITICAL, stages_chart, tasks_chart
from dataflow.drawing.style import INK, colours, contrast, save
from dataflow.errors import ConfigError
from dataflow.files import replaced, unwritable
from dataflow.graph import WHEN

if TYPE_CHECKING:
    import networkx as nx

    from dataflow.graph import Pipeline, TaskGraph

# In points.
_FONT, _SMALL, _PAD, _MARGIN, _FOOT = 9.0, 7.5, 7.0, 12.0, 16.0
_GAPS, _GAPS_DOWN = (17.0, 14.0), (24.0, 12.0)
# Looks of edges, as keyword arguments of matplotlib's patches and lines.
_PLAIN: dict[str, Any] = {"color": "#8A8A8A", "linewidth": 1.1}
_OTHER: dict[str, Any] = {**_PLAIN, "linestyle": (0, (4, 2.5))}
_CRITICAL: dict[str, Any] = {"color": CRITICAL, "linewidth": 2.2}
MOST = 800
"""The largest number of tasks in a picture, which takes ten seconds to lay out and draw. Mermaid text has no limit."""
_WIDEST = 820.0
"""A graph that would be wider, and so too wide to read on a screen, runs from top to bottom."""


class Earlier(NamedTuple):
    """A value of an earlier step.

    Attributes:
        stage: that wrote it.
        what: the field, and of which step.
    """

    stage: str
    what: str


def draw_graph(
    pipeline: Pipeline, graph: TaskGraph | None, path: Path, seconds: Mapping[str, float] | None = None
) -> None:
    """Draws the stages of a pipeline, or the tasks of a graph if one is given.

    Args:
        pipeline: the pipeline.
        graph: an unrolled graph to draw instead of the stages.
        path: file name ending in ``.mmd``, ``.svg`` or ``.png``.
        seconds: stage -> seconds, see :func:`critical_path`.

    Raises:
        ConfigError: the file name has another ending, or the graph has more tasks than a picture shows.
    """
    check_out(path)
    if graph is not None and path.suffix.lower() != ".mmd":
        _check_size(graph, path)
    shown = stages(pipeline) if graph is None else graph.window()
    critical = critical_path(pipeline, shown, seconds)
    if path.suffix.lower() == ".mmd":
        text = stages_chart(pipeline, critical) if graph is None else tasks_chart(shown, critical)
        with replaced(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    else:
        roles = {s.name: s.role for s in pipeline.stages if s.role}
        earlier = earlier_values(pipeline) if graph is None else {}
        _draw(shown, earlier, path, critical, colours([s.name for s in pipeline.stages], roles), _basis(seconds))


def check_out(path: Path) -> None:
    """Checks that a graph can be drawn into a file.

    Raises:
        ConfigError: the file name has another ending, or the file cannot be written.
    """
    if path.suffix.lower() not in (".mmd", ".svg", ".png"):
        raise ConfigError(f"-o {path}: give a name in .mmd (mermaid), .svg or .png.")
    if (why := unwritable(path)) is not None:
        raise ConfigError(f"-o {path}: {why}")


def _check_size(graph: TaskGraph, path: Path) -> None:
    tasks = 0
    for step in range(graph.first, graph.steps + 1):
        tasks += len(graph.unroll(step))
        if tasks > MOST:
            raise ConfigError(
                f"-o {path}: steps={graph.steps} has more than the {MOST} tasks that a picture shows; give fewer "
                "steps, or a name in .mmd, or --json."
            )


def stages(pipeline: Pipeline) -> nx.DiGraph:
    """Returns the stages of one step as a graph."""
    import networkx as nx

    graph: nx.DiGraph = nx.DiGraph()
    for s in pipeline.order:
        graph.add_node(s.name, stage=s.name, resource=s.on)
    # Edges from an earlier step would close a cycle; see earlier_values.
    graph.add_edges_from((a.name, b.name) for a, b, _field, lag in pipeline.edges if lag == "none")
    return graph


def earlier_values(pipeline: Pipeline) -> dict[Earlier, list[str]]:
    """Returns the values of earlier steps that the stages of one step read, with the stages that read each."""
    found: dict[Earlier, list[str]] = {}
    for a, b, field, lag in pipeline.edges:
        if lag != "none":
            found.setdefault(Earlier(a.name, f"{field} {WHEN[lag]}"), []).append(b.name)
    return found


def _basis(seconds: Mapping[str, float] | None) -> str:
    return "all stages count as equally long" if seconds is None else "by the times of the run"


def critical_path(pipeline: Pipeline, graph: nx.DiGraph, seconds: Mapping[str, float] | None = None) -> list[Any]:
    """Returns the nodes of the critical path, first to last.

    Args:
        pipeline: of the graph.
        graph: as of :func:`stages`, or of ``TaskGraph.window``.
        seconds: stage -> seconds of all its tasks in one step, 0 for stages left out. By default all stages take
            equally long.
    """
    import networkx as nx

    training = graph.subgraph(n for n, facts in graph.nodes(data=True) if _trains(pipeline, facts["stage"]))
    cost = {n: (1.0 if seconds is None else seconds.get(facts["stage"], 0.0)) / getattr(n, "parts", 1)
            for n, facts in training.nodes(data=True)}  # fmt: skip
    weighed: nx.DiGraph = nx.DiGraph()
    for node in training:
        weighed.add_edge("", node, weight=cost[node])  # a root, so that the first task counts, too
    weighed.add_weighted_edges_from((a, b, cost[b]) for a, b in training.edges)
    return list(nx.dag_longest_path(weighed))[1:] if cost else []


def _trains(pipeline: Pipeline, stage: str) -> bool:
    return pipeline.by_name[stage].every is None


def _draw(
    graph: nx.DiGraph,
    earlier: Mapping[Earlier, Sequence[str]],
    path: Path,
    critical: list[Any],
    colour: Mapping[str, str],
    basis: str,
) -> None:
    import networkx as nx
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    # Leave out edges implied by other paths.
    slim = nx.transitive_reduction(graph)
    slim.add_nodes_from(graph.nodes(data=True))
    texts = {node: (str(node), "" if str(node) != f["stage"] else f["resource"]) for node, f in slim.nodes(data=True)}
    texts |= {value: (value.stage, value.what) for value in earlier}
    slim.add_edges_from((value, reader) for value, readers in earlier.items() for reader in readers)
    boxes = {node: _box(*words) for node, words in texts.items()}
    placed = layered(slim, boxes, _GAPS)
    across = placed.size[0] <= _WIDEST
    if not across:
        placed = layered(slim, {node: box[::-1] for node, box in boxes.items()}, _GAPS_DOWN)
    between = {(a, b) for a, b in slim.edges if a in earlier or slim.nodes[a].get("step") != slim.nodes[b].get("step")}
    legend = [(f"critical path ({basis})", _CRITICAL)] if critical else []
    legend += [("from another step", _OTHER)] if between else []
    wide, high = placed.size if across else placed.size[::-1]
    wide = max(wide, *(_text(text, _SMALL) + 28 for text, _look in legend), 0.0) + 2 * _MARGIN
    high += 2 * _MARGIN + _FOOT * len(legend)
    figure = Figure(figsize=(wide / 72, high / 72), facecolor="white")
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set_axis_off()
    axis.set_xlim(-_MARGIN, wide - _MARGIN)
    axis.set_ylim(high - _MARGIN, -_MARGIN)
    place = {node: at if across else at[::-1] for node, at in placed.places.items()}
    on = set(itertools.pairwise(critical))
    for edge in sorted(slim.edges, key=lambda edge: edge in on):
        look = (_OTHER if edge in between else _PLAIN) | (_CRITICAL if edge in on else {})
        way = [at if across else at[::-1] for at in placed.ways[edge]]
        line = _line(place[edge[0]], boxes[edge[0]], way, place[edge[1]], boxes[edge[1]], across)
        head = FancyArrowPatch(path=line, arrowstyle="-|>", mutation_scale=9, **look)
        axis.add_patch(head)
    marked = set(critical)
    for node, (x, y) in place.items():
        w, h = boxes[node]
        if node in earlier:
            fill, look = "#FFFFFF", {"edgecolor": "#5A5A5A", "linewidth": 1.0, "linestyle": "--"}
        else:
            fill = colour[slim.nodes[node]["stage"]]
            look = (
                {"edgecolor": CRITICAL, "linewidth": 2.4}
                if node in marked
                else {"edgecolor": "#5A5A5A", "linewidth": 0.8}
            )
        shape = FancyBboxPatch((x - w / 2, y - h / 2), w, h, boxstyle="round,pad=0,rounding_size=4",
                               facecolor=fill, **look)  # fmt: skip
        axis.add_patch(shape)
        name, small = texts[node]
        words: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": contrast(fill), "parse_math": False}
        axis.text(x, y - (5 if small else 0), name, fontsize=_FONT, **words)
        axis.text(x, y + 8, small, fontsize=_SMALL, **words)
    for i, (text, look) in enumerate(reversed(legend)):
        foot = high - _MARGIN - 8 - i * _FOOT
        axis.plot([0, 22], [foot, foot], **look)
        axis.text(28, foot, text, fontsize=_SMALL, va="center_baseline", color=INK)
    save(figure, path, path.suffix.lower().lstrip("."))


def _box(name: str, small: str) -> tuple[float, float]:
    """Returns width and height of a node's box, in points like all lengths here."""
    return max(_text(name, _FONT), _text(small, _SMALL)) + 2 * _PAD, 30.0 if small else 21.0


def _text(text: str, size: float) -> float:
    """Returns the width of a text."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size=size).get_extents().width) if text else 0.0


def _line(
    begin: Point, first: Point, way: Sequence[Point], end: Point, last: Point, across: bool
) -> Any:  # a matplotlib Path
    """Returns a smooth line from the side of one box to the side of another, through the points of its way."""
    from matplotlib.path import Path as Line

    ahead = 0 if across else 1
    start, stop = list(begin), list(end)
    start[ahead] += first[ahead] / 2
    stop[ahead] -= last[ahead] / 2 + 1
    # Straight from the box to the end of its layer, then a bend to the next layer, straight through it, and so on.
    points = [tuple(start), *way[:-1], *([way[-1]] if way[-1][ahead] < stop[ahead] - 2 else []), tuple(stop)]
    vertices, codes = [points[0]], [Line.MOVETO]
    for i, ((x, y), (to_x, to_y)) in enumerate(itertools.pairwise(points)):
        if i % 2 == 0:
            vertices.append((to_x, to_y))
            codes.append(Line.LINETO)
            continue
        middle = ((x + to_x) / 2, (y + to_y) / 2)
        bends = [(middle[0], y), (middle[0], to_y)] if across else [(x, middle[1]), (to_x, middle[1])]
        vertices += [*bends, (to_x, to_y)]
        codes += [Line.CURVE4] * 3
    return Line(vertices, codes)
