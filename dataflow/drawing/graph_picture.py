"""Pictures of the graph: the stages of one step, or the tasks of several, as mermaid text, SVG or PNG.

The critical path is marked: the longest chain of dependent tasks, which no number of GPUs can shorten. Validation and
checkpoints are not on it, since training does not wait for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.drawing.mermaid import CRITICAL, stages_chart, tasks_chart
from dataflow.drawing.style import colours, contrast, save
from dataflow.errors import ConfigError
from dataflow.files import replaced, unwritable

if TYPE_CHECKING:
    import networkx as nx

    from dataflow.graph import Pipeline, TaskGraph


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
        ConfigError: the file name has another ending.
    """
    check_out(path)
    shown = stages(pipeline) if graph is None else graph.window()
    critical = critical_path(pipeline, shown, seconds)
    if path.suffix == ".mmd":
        text = stages_chart(pipeline, critical) if graph is None else tasks_chart(shown, critical)
        with replaced(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    else:
        roles = {s.name: s.role for s in pipeline.stages if s.role}
        _draw(shown, path, critical, colours([s.name for s in pipeline.stages], roles))


def check_out(path: Path) -> None:
    """Checks that a graph can be drawn into a file.

    Raises:
        ConfigError: the file name has another ending, or the file cannot be written.
    """
    if path.suffix not in (".mmd", ".svg", ".png"):
        raise ConfigError(f"-o {path}: give a name in .mmd (mermaid), .svg or .png.")
    if (why := unwritable(path)) is not None:
        raise ConfigError(f"-o {path}: {why}")


def stages(pipeline: Pipeline) -> nx.DiGraph:
    """Returns the stages of one step as a graph."""
    import networkx as nx

    graph: nx.DiGraph = nx.DiGraph()
    for s in pipeline.order:
        graph.add_node(s.name, stage=s.name, resource=s.on)
    # Edges from an earlier step would close a cycle in the picture of one step; the unrolled graph shows them.
    graph.add_edges_from((a.name, b.name) for a, b, _field, lag in pipeline.edges if lag == "none")
    return graph


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


def _draw(graph: nx.DiGraph, path: Path, critical: list[Any], colour: Mapping[str, str]) -> None:
    import networkx as nx
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    # Leave out edges implied by other paths.
    slim = nx.transitive_reduction(graph)
    slim.add_nodes_from(graph.nodes(data=True))
    for layer, generation in enumerate(nx.topological_generations(slim)):
        for node in generation:
            slim.nodes[node]["layer"] = layer
    place = nx.multipartite_layout(slim, subset_key="layer")
    layers = 1 + max((facts["layer"] for _, facts in slim.nodes(data=True)), default=0)
    figure = Figure(figsize=(max(8.0, 1.35 * layers), 5.0), layout="constrained")
    axis = figure.add_subplot()
    axis.set_axis_off()
    on = {edge for edge in itertools.pairwise(critical) if edge in slim.edges}
    others = [edge for edge in slim.edges if edge not in on]
    common = {"ax": axis, "arrowsize": 9, "node_size": 900}
    nx.draw_networkx_edges(slim, place, others, edge_color="0.55", **common)
    nx.draw_networkx_edges(slim, place, sorted(on), edge_color=CRITICAL, width=2.4, **common)
    marked_too = set(critical)
    nx.draw_networkx_nodes(
        slim,
        place,
        ax=axis,
        node_size=700,
        node_color=[colour[f["stage"]] for _, f in slim.nodes(data=True)],
        edgecolors=[CRITICAL if node in marked_too else "none" for node in slim],
        linewidths=2.4,
    )
    labels = {node: str(node).replace("[", "\n[").replace("_", "_\n", 1) for node in slim}
    for ink in ("black", "white"):
        some = {node: text for node, text in labels.items() if contrast(colour[slim.nodes[node]["stage"]]) == ink}
        nx.draw_networkx_labels(slim, place, some, ax=axis, font_size=6, font_color=ink)
    by_resource = {f["stage"]: f["resource"] for _, f in slim.nodes(data=True)}
    handles: list[Any] = [Patch(color=colour[name], label=f"{name} ({on})") for name, on in by_resource.items()]
    handles.append(Line2D([], [], color=CRITICAL, linewidth=2.4, label="critical path"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    save(figure, path, path.suffix.lstrip("."))
