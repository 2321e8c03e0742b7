"""Pictures of the graph: the stages of one step, or the tasks of several, as mermaid text, SVG or PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.errors import ConfigError
from dataflow.timeline.picture import colours

if TYPE_CHECKING:
    import networkx as nx

    from dataflow.graph import Pipeline, TaskGraph


def draw_graph(pipeline: Pipeline, graph: TaskGraph | None, path: Path) -> None:
    """Draws the pipeline, or the tasks of a graph if one is given.

    Raises:
        ConfigError: a kind of file that is none of .mmd, .svg, .png.
    """
    if path.suffix not in (".mmd", ".svg", ".png"):
        raise ConfigError(f"-o {path}: give a name in .mmd (mermaid), .svg or .png.")
    if path.suffix == ".mmd":
        path.write_text((pipeline.draw() if graph is None else _mermaid(graph.window())) + "\n")
        return
    _draw(_stages(pipeline) if graph is None else graph.window(), path)


def _stages(pipeline: Pipeline) -> nx.DiGraph:
    import networkx as nx

    graph: nx.DiGraph = nx.DiGraph()
    for s in pipeline.order:
        graph.add_node(s.name, stage=s.name, resource=s.on)
    # Edges from an earlier step would close a cycle: the picture shows one step, the rest is in the unrolled one.
    graph.add_edges_from((a.name, b.name) for a, b, _field, lag in pipeline.edges if lag == "none")
    return graph


def _mermaid(graph: nx.DiGraph) -> str:
    names = {task: f"t{i}" for i, task in enumerate(graph)}
    lines = ["flowchart LR", *(f'    {names[task]}["{task}"]' for task in graph)]
    return "\n".join([*lines, *(f"    {names[a]} --> {names[b]}" for a, b in graph.edges)])


def _draw(graph: nx.DiGraph, path: Path) -> None:
    import networkx as nx
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    # What another path says already only clutters the picture.
    slim = nx.transitive_reduction(graph)
    slim.add_nodes_from(graph.nodes(data=True))
    for layer, generation in enumerate(nx.topological_generations(slim)):
        for node in generation:
            slim.nodes[node]["layer"] = layer
    place = nx.multipartite_layout(slim, subset_key="layer")
    layers = 1 + max((facts["layer"] for _, facts in slim.nodes(data=True)), default=0)
    colour = colours(facts["stage"] for _, facts in slim.nodes(data=True))
    figure = Figure(figsize=(max(8.0, 1.35 * layers), 5.0), layout="constrained")
    axis = figure.add_subplot()
    axis.set_axis_off()
    nx.draw_networkx_edges(slim, place, ax=axis, edge_color="0.55", arrowsize=9, node_size=900)
    nx.draw_networkx_nodes(
        slim, place, ax=axis, node_size=700, node_color=[colour[f["stage"]] for _, f in slim.nodes(data=True)]
    )
    labels = {node: str(node).replace("[", "\n[").replace("_", "_\n", 1) for node in slim}
    nx.draw_networkx_labels(slim, place, labels, ax=axis, font_size=6)
    by_resource = {f["stage"]: f["resource"] for _, f in slim.nodes(data=True)}
    handles = [Patch(color=colour[name], label=f"{name} ({on})") for name, on in by_resource.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)
