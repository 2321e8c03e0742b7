"""Pictures of the graph: the stages of one step as mermaid text, SVG or PNG, the tasks of several steps as mermaid.

The critical path is marked: the longest chain of dependent tasks, which no number of GPUs can shorten. Validation and
checkpoints are not on it, since training does not wait for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dataflow.drawing.style import INK, colours, contrast, save
from dataflow.errors import ConfigError
from dataflow.files import replaced, unwritable
from dataflow.graph import WHEN

if TYPE_CHECKING:
    import networkx as nx

    from dataflow.graph import Pipeline, TaskGraph

CRITICAL = "#C00000"
_PLAIN: dict[str, Any] = {"color": "#8A8A8A", "linewidth": 1.1}
"""The look of an edge, as keyword arguments of matplotlib."""


def draw_graph(
    pipeline: Pipeline, graph: TaskGraph | None, path: Path, seconds: Mapping[str, float] | None = None
) -> None:
    """Draws the stages of a pipeline, or the tasks of an unrolled graph, into a ``.mmd``, ``.svg`` or ``.png`` file.

    Tasks are drawn as mermaid text alone. For ``seconds`` see :func:`critical_path`.
    """
    check_out(path, tasks=graph is not None)
    shown = stages(pipeline) if graph is None else graph.window()
    critical = critical_path(pipeline, shown, seconds)
    if path.suffix.lower() == ".mmd":
        text = stages_chart(pipeline, critical) if graph is None else tasks_chart(shown, critical)
        with replaced(path) as temporary:
            temporary.write_text(text + "\n", encoding="utf-8")
    else:
        basis = "all stages count as equally long" if seconds is None else "by the times of the run"
        _draw(pipeline, shown, path, critical, f"critical path ({basis})")


def check_out(path: Path, tasks: bool) -> None:
    """Checks that a graph, of tasks or of stages, can be drawn into a file."""
    kinds = ".mmd (mermaid)" if tasks else ".mmd (mermaid), .svg or .png"
    if path.suffix.lower() not in ((".mmd",) if tasks else (".mmd", ".svg", ".png")):
        raise ConfigError(f"-o {path}: give a name in {kinds}{', as tasks are drawn by that alone' * tasks}.")
    if (why := unwritable(path)) is not None:
        raise ConfigError(f"-o {path}: {why}")


def stages(pipeline: Pipeline) -> nx.DiGraph:
    """Returns the stages of one step as a graph, without what they read from earlier steps: that would close cycles."""
    import networkx as nx

    graph: nx.DiGraph = nx.DiGraph()
    for s in pipeline.order:
        graph.add_node(s.name, stage=s.name, resource=s.on)
    graph.add_edges_from((a.name, b.name) for a, b, _field, lag in pipeline.edges if lag == "none")
    return graph


def critical_path(pipeline: Pipeline, graph: nx.DiGraph, seconds: Mapping[str, float] | None = None) -> list[Any]:
    """Returns the nodes of the critical path, first to last.

    ``graph`` is that of :func:`stages`, or of ``TaskGraph.window``. ``seconds`` are of all tasks of a stage in one
    step, 0 for stages left out; by default all stages take equally long.
    """
    import networkx as nx

    training = graph.subgraph(
        n for n, facts in graph.nodes(data=True) if pipeline.by_name[facts["stage"]].every is None
    )
    cost = {n: (1.0 if seconds is None else seconds.get(facts["stage"], 0.0)) / getattr(n, "parts", 1)
            for n, facts in training.nodes(data=True)}  # fmt: skip
    weighed: nx.DiGraph = nx.DiGraph()
    for node in training:
        weighed.add_edge("", node, weight=cost[node])  # a root, so that the first task counts, too
    weighed.add_weighted_edges_from((a, b, cost[b]) for a, b in training.edges)
    return list(nx.dag_longest_path(weighed))[1:] if cost else []


def _draw(pipeline: Pipeline, graph: nx.DiGraph, path: Path, critical: Sequence[str], basis: str) -> None:
    import networkx as nx
    from matplotlib.figure import Figure

    layers = dict(enumerate(nx.topological_generations(graph)))
    layer = {name: at for at, names in layers.items() for name in names}
    place = nx.multipartite_layout(graph, layers, align="horizontal")
    wide, high = 2.1 * max(map(len, layers.values())), 0.4 + 0.85 * len(layers)
    figure = Figure(figsize=(max(5.0, wide), max(1.6, high)), facecolor="white")
    axis = figure.add_axes((0.01, 0.4 / high, 0.98, 0.99 - 0.4 / high))
    axis.set_axis_off()
    colour = colours([s.name for s in pipeline.stages], {s.name: s.role for s in pipeline.stages if s.role})
    boxes: dict[str, Any] = {}
    for s in pipeline.stages:
        edge = {"edgecolor": CRITICAL, "linewidth": 2.4} if s.name in critical else {"edgecolor": "#5A5A5A"}
        box = {"boxstyle": "round,pad=0.5", "facecolor": colour[s.name], **edge}
        for height in (0, 3):  # an arrow ends at boxes that are drawn before it, and passes below those on its way
            x, y = place[s.name]
            shown = axis.text(x, y, f"{s.name}\n{s.on}", fontsize=9, color=contrast(colour[s.name]),
                              ha="center", va="center", parse_math=False, bbox=box, zorder=height)  # fmt: skip
            boxes.setdefault(s.name, shown.get_bbox_patch())
    # Edges implied by other paths are left out.
    links: dict[tuple[str, str], dict[str, Any]] = {edge: {} for edge in nx.transitive_reduction(graph).edges}
    links |= {(a.name, b.name): {"linestyle": "--"} for a, b, _field, lag in pipeline.edges if lag != "none"}
    on = set(itertools.pairwise(critical))
    for (a, b), look in links.items():
        look = _PLAIN | look | ({"color": CRITICAL, "linewidth": 2.2} if (a, b) in on else {})
        # An edge that passes layers bends around the boxes in them.
        bend = 0.0 if layer[b] == layer[a] + 1 else 0.2
        arrow = {"arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend}", "shrinkA": 0, "shrinkB": 1, **look}
        ends = {"patchA": boxes[a], "patchB": boxes[b]} if a != b else {}
        axis.annotate("", place[b], place[a], zorder=1, arrowprops={**ends, **arrow})
    for at, set_room in ((0, axis.set_xlim), (1, axis.set_ylim)):
        values = [where[at] for where in place.values()]
        half = (max(values) - min(values)) / 8 or 0.5
        set_room(min(values) - half, max(values) + half)
    axis.invert_yaxis()
    axis.plot([], [], label=basis, color=CRITICAL, linewidth=2.2)
    axis.plot([], [], label="from an earlier step", linestyle="--", **_PLAIN)
    figure.legend(loc="lower left", fontsize=7.5, frameon=False, labelcolor=INK)
    save(figure, path, path.suffix.lower().lstrip("."))


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
