"""The README is correct: its pipeline builds; its files and commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import dataflow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


class Tool:
    pass


def test_the_pipeline_in_20_lines_expands_and_runs_on_the_virtual_clock() -> None:
    from dataflow.testing import RandomCosts, check_trace, simulate

    code = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    names: dict[str, object] = {"MyTrainer": Tool, "MyEngine": Tool, "MyAgent": Tool}
    exec(code[1], names)
    graph = names["graph"]
    assert isinstance(graph, dataflow.graph.TaskGraph)
    assert isinstance(graph.pipeline, dataflow.Pipeline)
    short = dataflow.expand(graph.pipeline, dataflow.preset("both", 4), steps=5, mini_batches=4, groups=32)
    trace, _seen = simulate(short, RandomCosts(seed=0, groups=32))
    check_trace(trace, short)
    assert len(code[1].strip().splitlines()) <= 20


def test_files_and_make_targets_it_names_exist() -> None:
    for path in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / path).exists(), path
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", README, re.MULTILINE))
    for target in {first or second for first, second in named}:
        assert f"\n{target}:" in makefile, target
