"""Places the boxes of a graph in layers, as Sugiyama's method does, with room for the edges between them. Pure.

Each edge runs from one layer to the next; a longer one gets a point in each layer that it passes, which keeps boxes off
its way. The order within a layer is the one with the fewest crossings that sweeps over the layers find; positions
are as near to those of the neighbours as the sizes of the boxes allow.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import networkx as nx

Point = tuple[float, float]
_SWEEPS = 24
_THIN = 0.35
"""Room of an edge that passes a layer, as a share of the gap between boxes."""


@dataclass(frozen=True)
class Layout:
    """Where everything is; lengths have the unit of the sizes that were given.

    Attributes:
        places: node -> middle of its box.
        ways: edge -> the points that it runs through: where it leaves the layer of its first node, where it enters and
            leaves each layer that it passes, and where it enters the layer of its second node. Within a layer it is
            straight, between two layers it may bend.
        size: of the whole: (along the layers' normal, across).
    """

    places: Mapping[Any, Point]
    ways: Mapping[tuple[Any, Any], tuple[Point, ...]]
    size: Point


def layered(graph: nx.DiGraph, sizes: Mapping[Any, Point], gap: Point) -> Layout:
    """Returns the layout of an acyclic graph, whose layers follow each other along the first coordinate.

    Args:
        graph: the graph.
        sizes: node -> (length along the first coordinate, across).
        gap: the same between two layers, and between two boxes of a layer.
    """
    layers, chains = _layers(graph)
    pairs = [pair for chain in chains.values() for pair in itertools.pairwise(chain)]
    before: dict[Any, list[Any]] = {}
    after: dict[Any, list[Any]] = {}
    for a, b in pairs:
        after.setdefault(a, []).append(b)
        before.setdefault(b, []).append(a)
    layers = _ordered(layers, before, after)
    wide = {node: sizes[node][1] + gap[1] if node in sizes else _THIN * gap[1] for layer in layers for node in layer}
    across = _across(layers, before, after, wide)
    lengths = [max((sizes[node][0] for node in layer if node in sizes), default=0.0) for layer in layers]
    begins = [0.0, *itertools.accumulate(length + gap[0] for length in lengths)]
    spans = {n: (begins[i], begins[i] + lengths[i]) for i, layer in enumerate(layers) for n in layer}
    least = min((across[n] - wide[n] / 2 for n in wide), default=0.0)
    most = max((across[n] + wide[n] / 2 for n in wide), default=0.0)
    ways = {
        edge: tuple((along, across[n] - least) for n in chain for along in spans[n])[1:-1]
        for edge, chain in chains.items()
    }
    places = {node: (sum(spans[node]) / 2, across[node] - least) for node in graph}
    return Layout(places, ways, (max(0.0, begins[-1] - gap[0]), most - least))


def _layers(graph: nx.DiGraph) -> tuple[list[list[Hashable]], dict[tuple[Any, Any], list[Hashable]]]:
    """Returns the layers, with points of the edges that pass them, and edge -> its nodes and points."""
    import networkx as nx

    rank = {node: i for i, generation in enumerate(nx.topological_generations(graph)) for node in generation}
    # A node that nothing leads to stands just before the first one that it leads to.
    rank |= {n: min(rank[m] for m in graph[n]) - 1 for n in graph if not graph.in_degree(n) and graph.out_degree(n)}
    layers: list[list[Hashable]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for node, at in rank.items():
        layers[at].append(node)
    chains: dict[tuple[Any, Any], list[Hashable]] = {}
    for a, b in graph.edges:
        points: list[Hashable] = [(a, b, i) for i in range(rank[a] + 1, rank[b])]
        for i, point in enumerate(points, rank[a] + 1):
            layers[i].append(point)
        chains[a, b] = [a, *points, b]
    return layers, chains


def _ordered(
    layers: list[list[Any]], before: Mapping[Any, list[Any]], after: Mapping[Any, list[Any]]
) -> list[list[Any]]:
    """Returns the layers in the order with the fewest crossings that was found."""
    best, least = layers, _crossings(layers, after)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        layers = [list(layer) for layer in layers]
        for i in range(1, len(layers)) if down else range(len(layers) - 2, -1, -1):
            near, links = (layers[i - 1], before) if down else (layers[i + 1], after)
            at = {node: place for place, node in enumerate(near)}
            own = {node: place for place, node in enumerate(layers[i])}
            layers[i].sort(key=lambda n: (_mean([at[m] for m in links.get(n, ())], own[n]), own[n]))
        if (found := _crossings(layers, after)) < least:
            best, least = layers, found
    return best


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _crossings(layers: Sequence[Sequence[Any]], after: Mapping[Any, list[Any]]) -> int:
    count = 0
    for layer, following in itertools.pairwise(layers):
        at = {node: place for place, node in enumerate(following)}
        ends = [sorted(at[m] for m in after.get(node, ())) for node in layer]
        count += sum(b < a for first, second in itertools.combinations(ends, 2) for a in first for b in second)
    return count


def _across(
    layers: Sequence[Sequence[Any]],
    before: Mapping[Any, list[Any]],
    after: Mapping[Any, list[Any]],
    wide: Mapping[Any, float],
) -> dict[Any, float]:
    """Returns the position of each node in its layer: near its neighbours, in order, without overlap."""
    place: dict[Any, float] = {}
    for layer in layers:
        ends = list(itertools.accumulate(wide[node] for node in layer))
        place |= {node: end - wide[node] / 2 - ends[-1] / 2 for node, end in zip(layer, ends, strict=True)}
    for sweep in range(_SWEEPS):
        links = [(before, after), (after, before)][sweep % 2]
        for layer in layers if sweep % 2 == 0 else reversed(layers):
            both = sweep >= _SWEEPS // 2
            near = {n: [*links[0].get(n, ()), *(links[1].get(n, ()) if both else ())] for n in layer}
            wanted = [_mean([place[m] for m in near[n]], place[n]) for n in layer]
            # Long edges are kept straight before boxes are moved to the middle of their neighbours.
            weights = [1.0 if n in wide and wide[n] > min(wide.values()) else 4.0 for n in layer]
            place |= dict(zip(layer, _apart(wanted, [wide[n] for n in layer], weights), strict=True))
    return place


def _apart(wanted: Sequence[float], wide: Sequence[float], weights: Sequence[float]) -> list[float]:
    """Returns the positions nearest to the wanted ones, in order and without overlap (isotonic regression)."""
    offsets = [0.0]
    for a, b in itertools.pairwise(wide):
        offsets.append(offsets[-1] + (a + b) / 2)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, number of boxes
    for want, offset, weight in zip(wanted, offsets, weights, strict=True):
        block = (want - offset, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            mean, heavy, count = blocks.pop()
            total = heavy + block[1]
            block = ((mean * heavy + block[0] * block[1]) / total, total, count + block[2])
        blocks.append(block)
    starts = [mean for mean, _, count in blocks for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]
