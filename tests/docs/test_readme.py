"""The README and the tour are correct: the pipeline builds; files, make targets and commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dataflow
from dataflow.cli import main
from dataflow.data.rows import load_rows

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


class Tool:
    pass


def test_the_pipeline_in_20_lines_expands_and_runs_on_the_virtual_clock() -> None:
    from dataflow.testing import check_trace
    from tests.rigs.costs import RandomCosts
    from tests.rigs.scheduling import simulate

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


@pytest.mark.parametrize("page", ["README.md", "docs/tour.md"])
def test_files_make_targets_and_commands_it_names_exist(page: str) -> None:
    path = ROOT / page
    text = path.read_text()
    for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text):
        assert (path.parent / link).exists(), link
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", text, re.MULTILINE))
    for target in {first or second for first, second in named}:
        assert f"\n{target}:" in makefile, target
    for command in re.findall(r"bin/dataflow ([a-z-]+)", text):
        with pytest.raises(SystemExit) as end:
            main([command, "--help"])
        assert end.value.code == 0, command


def test_the_rows_that_the_tour_shows_can_be_read(tmp_path: Path) -> None:
    block = re.search(r"```jsonl\n(.*?)```", (ROOT / "docs" / "tour.md").read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "train.jsonl").write_text(block[1])
    rows, _labels = load_rows(tmp_path / "train.jsonl")
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["7", "hello"]
    assert rows[1]["extra_info"]["level"] == 1


def test_the_readme_fits_on_one_screen() -> None:
    lines = README.splitlines()
    assert len(lines) <= 90
    assert lines.index("## Policies") < 55
