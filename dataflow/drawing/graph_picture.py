"""Pictures of the graph: the stages of one step, or the tasks of several, as mermaid text, SVG or PNG.

The critical path is marked: the longest chain of dependent tasks, which no number of GPUs can shorten. Validation and
checkpoints are not on it, since training does not wait for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dataflow.drawing.style import INK, colours, contrast, save
from dataflow.errors import ConfigError
from dataflow.files import replaced, unwritable
from dataflow.graph import WHEN

if TYPE_CHECKING:
    import networkx as nx

    from dataflow.graph import Pipeline, TaskGraph

CRITICAL = "#C00000"
# Looks of edges, as keyword arguments of matplotlib's patches and lines.
_PLAIN: dict[str, Any] = {"color": "#8A8A8A", "linewidth": 1.1}
_OTHER: dict[str, Any] = {**_PLAIN, "linestyle": (0, (4, 2.5))}
_CRITICAL: dict[str, Any] = {"color": CRITICAL, "linewidth": 2.2}
MOST = 800
"""The largest number of tasks in a picture, which takes ten seconds to lay out and draw. Mermaid text has no limit."""
_ACROSS = 8
"""A graph of more layers, which would be too wide to read on a screen, runs from top to bottom."""


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

    # Leave out edges implied by other paths; those left stay in their order, by which the layout places the nodes.
    reduced = nx.transitive_reduction(graph)
    slim: nx.DiGraph = nx.DiGraph()
    slim.add_nodes_from(graph.nodes(data=True))
    slim.add_edges_from(edge for edge in graph.edges if reduced.has_edge(*edge))
    texts = {
        node: str(node) if str(node) != f["stage"] else f"{node}\n{f['resource']}" for node, f in slim.nodes.items()
    }
    texts |= {value: f"{value.stage}\n{value.what}" for value in earlier}
    slim.add_edges_from((value, reader) for value, readers in earlier.items() for reader in readers)
    layer = {node: at for at, nodes in enumerate(nx.topological_generations(slim)) for node in nodes}
    layer |= {value: min(layer[reader] for reader in slim[value]) - 1 for value in earlier}  # just before its readers
    layers: dict[int, list[Any]] = {}
    for node in slim:
        layers.setdefault(layer[node], []).append(node)
    long, wide = len(layers), max(map(len, layers.values()))
    across = long <= _ACROSS
    place = nx.multipartite_layout(slim, layers, align="vertical" if across else "horizontal")
    size = (2.1 * long, 0.4 + 0.75 * wide) if across else (2.1 * wide, 0.4 + 0.75 * long)
    figure = Figure(figsize=(max(5.0, size[0]), max(1.6, size[1])), facecolor="white")
    foot = 0.4 / figure.get_figheight()  # of the legend
    axis = figure.add_axes((0.01, foot, 0.98, 0.99 - foot))
    axis.set_axis_off()
    boxes: dict[Any, Any] = {}
    marked, on = set(critical), set(itertools.pairwise(critical))
    for node, at in place.items():
        fill = "#FFFFFF" if node in earlier else colour[slim.nodes[node]["stage"]]
        edge = (
            {"edgecolor": CRITICAL, "linewidth": 2.4} if node in marked else {"edgecolor": "#5A5A5A", "linewidth": 0.8}
        )
        box = {"boxstyle": "round,pad=0.5", "facecolor": fill, "linestyle": "--" if node in earlier else "-", **edge}
        for height in (0, 3):  # an arrow ends at boxes that are drawn before it, and passes below those on its way
            shown = axis.text(at[0], at[1], texts[node], fontsize=9, color=contrast(fill), ha="center", va="center",
                              parse_math=False, bbox=box, zorder=height)  # fmt: skip
            boxes.setdefault(node, shown.get_bbox_patch())
    for a, b in slim.edges:
        another = a in earlier or slim.nodes[a].get("step") != slim.nodes[b].get("step")
        look = (_OTHER if another else _PLAIN) | (_CRITICAL if (a, b) in on else {})
        # An edge that passes layers bends around the boxes in them.
        bend = 0.0 if layer[b] == layer[a] + 1 else 0.15
        arrow = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 1, **look}
        axis.annotate("", place[b], place[a], zorder=1, arrowprops={"patchA": boxes[a], "patchB": boxes[b], **arrow})
    axis.set_xlim(*_room([x for x, _ in place.values()], long if across else wide))
    axis.set_ylim(*reversed(_room([y for _, y in place.values()], wide if across else long)))
    lines = [(f"critical path ({basis})", _CRITICAL)] * bool(critical) + [("from another step", _OTHER)]
    for text, look in lines:
        axis.plot([], [], label=text, **look)
    figure.legend(loc="lower left", fontsize=7.5, frameon=False, labelcolor=INK)
    save(figure, path, path.suffix.lower().lstrip("."))


def _room(values: Sequence[float], number: int) -> tuple[float, float]:
    """Returns the ends of an axis that leaves half a place beside the outermost nodes."""
    low, high = min(values), max(values)
    half = (high - low) / max(1, number - 1) / 2 or 0.5
    return low - half, high + half


# --- mermaid text, which GitHub and most editors draw -----------------------------------------------------------------


def stages_chart(pipeline: Pipeline, critical: Sequence[str] = ()) -> str:
    """Returns the stages of a pipeline as a flowchart; dotted edges come from an earlier step."""
    # Names are labels only: mermaid has words of its own, such as "end", that no node can be called.
    ids = {s.name: f"s{at}" for at, s in enumerate(pipeline.stages)}
    inputs = {name: f"i{at}" for at, name in enumerate(pipeline.inputs)}
    nodes = [f'{ids[s.name]}["{s.name}<br/><small>{s.on}</small>"]' for s in pipeline.stages]
    nodes += [f'{at}(["{name}"])' for name, at in inputs.items()]
    links = [(inputs[r.field], ids[s.name], "-->") for s in pipeline.stages for r in s.reads if r.field in inputs]
    for a, b, name, lag in pipeline.edges:
        arrow = "-->" if lag == "none" else "-.->"
        label = f'|"{f"{name} {WHEN[lag]}".strip()}"|' if name else ""
        links.append((ids[a.name], ids[b.name], arrow + label))
    return _flowchart(nodes, links, [ids[name] for name in critical])


def tasks_chart(graph: nx.DiGraph, critical: Sequence[Hashable] = ()) -> str:
    """Returns tasks, as of ``TaskGraph.window``, as a flowchart; see :func:`stages_chart`."""
    names = {task: f"t{i}" for i, task in enumerate(graph)}
    nodes = [f'{name}["{task}"]' for task, name in names.items()]
    links = [(names[a], names[b], "-->") for a, b in graph.edges]
    return _flowchart(nodes, links, [names[task] for task in critical])


def _flowchart(nodes: Sequence[str], links: Sequence[tuple[str, str, str]], critical: Sequence[str]) -> str:
    lines = ["flowchart LR", *nodes, *(f"{a} {arrow} {b}" for a, b, arrow in links)]
    if critical:
        lines += [f"classDef critical stroke:{CRITICAL},stroke-width:3px", f"class {','.join(critical)} critical"]
        on = set(itertools.pairwise(critical))
        # Links have numbers for names; one from an earlier step is on no path of this step.
        numbers = [str(i) for i, (a, b, arrow) in enumerate(links) if (a, b) in on and arrow.startswith("-->")]
        if numbers:
            lines.append(f"linkStyle {','.join(numbers)} stroke:{CRITICAL},stroke-width:3px")
    return "\n    ".join(lines)
