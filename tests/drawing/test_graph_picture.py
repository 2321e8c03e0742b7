"""Pictures of the graph, and the critical path in them."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from dataflow.drawing.graph_picture import critical_path, draw_graph, stages
from dataflow.errors import ConfigError
from dataflow.graph import Carried, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand


@stage(writes="responses", on="gpu")
def rollout(prompts, actor: Carried): ...


@stage(writes="rewards", on="reward", role="collects")
def collect(responses): ...


@stage(writes="old", on="gpu")
def log_prob(responses): ...


@stage(writes="actor", on="gpu", splittable=True)
def update(old, rewards): ...


@stage(on="gpu", every=1)
def validate(actor): ...


def pipeline() -> Pipeline:
    return Pipeline(
        stages=[rollout, collect, log_prob, update, validate],
        inputs=["prompts"],
        resources={"gpu": 1, "reward": None},
    )


def names(path: list[object]) -> list[str]:
    return [str(node) for node in path]


def test_the_chain_that_takes_longest_and_no_validation() -> None:
    p = pipeline()
    fast_rewards = {"rollout": 2.0, "collect": 1.0, "log_prob": 3.0, "update": 1.0, "validate": 99.0}
    slow_rewards = {**fast_rewards, "collect": 4.0}
    assert names(critical_path(p, stages(p), fast_rewards)) == ["rollout", "log_prob", "update"]
    assert names(critical_path(p, stages(p), slow_rewards)) == ["rollout", "collect", "update"]
    assert len(critical_path(p, stages(p))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("unrolled", [False, True])
def test_every_kind_of_picture_marks_it(tmp_path: Path, unrolled: bool) -> None:
    p = pipeline()
    graph = expand(p, SchedulingPolicy(split=2), 2, 2, groups=4) if unrolled else None
    draw_graph(p, graph, tmp_path / "g.mmd")
    text = (tmp_path / "g.mmd").read_text()
    (found,) = re.findall(r"^    class (\S+) critical$", text, re.MULTILINE)
    links = [line for line in text.splitlines() if " --> " in line or " -->|" in line or " -.->" in line]
    (numbers,) = re.findall(r"^    linkStyle (\S+) stroke", text, re.MULTILINE)
    ends = [(links[int(i)].split()[0], links[int(i)].split()[-1]) for i in numbers.split(",")]
    assert ends == list(itertools.pairwise(found.split(","))), "the links are those between the marked nodes"
    if unrolled:
        return
    assert '-.->|"actor of 1 + max_staleness steps before"|' in text
    for kind in ("svg", "png"):
        draw_graph(p, None, tmp_path / f"g.{kind}")
    svg = (tmp_path / "g.svg").read_text()
    for word in ("critical path (all stages count as equally long)", "from an earlier step", "#c00000", "log_prob"):
        assert word in svg
    draw_graph(p, None, tmp_path / "timed.svg", {"rollout": 1.0})
    assert "critical path (by the times of the run)" in (tmp_path / "timed.svg").read_text()
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_another_kind_is_refused_and_nothing_written(tmp_path: Path) -> None:
    graph = expand(pipeline(), SchedulingPolicy(), 10**9, 2, groups=4)
    with pytest.raises(ConfigError, match=r"give a name in \.mmd \(mermaid\), \.svg or \.png"):
        draw_graph(pipeline(), None, tmp_path / "g.pdf")
    with pytest.raises(ConfigError, match=r"give a name in \.mmd \(mermaid\), as tasks"):
        draw_graph(pipeline(), graph, tmp_path / "g.svg")
    assert list(tmp_path.iterdir()) == []
