"""Graphs as mermaid text, which GitHub and most editors draw. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from dataflow.graph import WHEN

if TYPE_CHECKING:
    import networkx as nx

    from dataflow.graph import Pipeline

CRITICAL = "#C00000"


def stages_chart(pipeline: Pipeline, critical: Sequence[str] = ()) -> str:
    """Returns the stages of a pipeline as a flowchart; dotted edges come from an earlier step.

    Args:
        pipeline: whose.
        critical: stages to mark, with the edges from each to the next.
    """
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
