"""Boxes lie in layers and do not overlap; edges run around them."""

from __future__ import annotations

import itertools

import networkx as nx
from hypothesis import given
from hypothesis import strategies as st

from dataflow.drawing.layout import layered

GAP = (10.0, 8.0)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[nx.DiGraph, dict[int, tuple[float, float]]]:
    count = draw(st.integers(1, 12))
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(range(count))
    pairs = list(itertools.combinations(range(count), 2))
    graph.add_edges_from(draw(st.lists(st.sampled_from(pairs), max_size=20, unique=True)) if pairs else [])
    sizes = {node: (draw(st.floats(5, 90)), draw(st.floats(5, 30))) for node in graph}
    return graph, sizes


@given(graphs())
def test_boxes_are_apart_and_inside(made: tuple[nx.DiGraph, dict[int, tuple[float, float]]]) -> None:
    graph, sizes = made
    found = layered(graph, sizes, GAP)
    for a, b in itertools.combinations(graph, 2):
        apart = [abs(found.places[a][i] - found.places[b][i]) - (sizes[a][i] + sizes[b][i]) / 2 for i in (0, 1)]
        assert max(x - gap for x, gap in zip(apart, GAP, strict=True)) >= -1e-6
    for node, at in found.places.items():
        for i in (0, 1):
            assert at[i] - sizes[node][i] / 2 >= -1e-6
            assert at[i] + sizes[node][i] / 2 <= found.size[i] + 1e-6


@given(graphs())
def test_edges_run_forwards_and_pass_no_box(made: tuple[nx.DiGraph, dict[int, tuple[float, float]]]) -> None:
    graph, sizes = made
    found = layered(graph, sizes, GAP)
    assert set(found.ways) == set(graph.edges)
    for (a, b), way in found.ways.items():
        along = [found.places[a][0], *(x for x, _ in way), found.places[b][0]]
        assert along == sorted(along)
        for ((x, y), (to_x, to_y)), node in itertools.product(zip(way[1::2], way[2::2], strict=False), graph):
            assert y == to_y
            at, size = found.places[node], sizes[node]
            beside = to_x <= at[0] - size[0] / 2 or at[0] + size[0] / 2 <= x
            assert beside or abs(y - at[1]) > size[1] / 2


def test_a_chain_is_straight_and_crossings_are_taken_out() -> None:
    chain = layered(nx.DiGraph([(0, 1), (1, 2)]), dict.fromkeys(range(3), (20.0, 10.0)), GAP)
    assert len({y for _, y in chain.places.values()}) == 1
    assert [x for x, _ in chain.places.values()] == [10.0, 40.0, 70.0]
    assert chain.size == (80.0, 18.0)
    crossed = layered(nx.DiGraph([("a", "d"), ("b", "c")]), dict.fromkeys("abcd", (20.0, 10.0)), GAP)
    y = {node: at[1] for node, at in crossed.places.items()}
    assert (y["a"] < y["b"]) == (y["d"] < y["c"])


def test_nothing_has_no_size() -> None:
    assert layered(nx.DiGraph(), {}, GAP).size == (0.0, 0.0)


def test_a_node_that_nothing_leads_to_stands_just_before_its_reader() -> None:
    graph = nx.DiGraph([(0, 1), (1, 2), ("late", 2)])
    found = layered(graph, dict.fromkeys(graph, (20.0, 10.0)), GAP)
    assert found.places["late"][0] == found.places[1][0]
