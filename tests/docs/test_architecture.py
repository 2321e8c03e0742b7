"""docs/architecture.md names functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", TEXT)))


def defined(tree: ast.Module) -> set[str]:
    """Returns the functions, classes and methods of a module."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{method.name}" for method in methods}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("file", "function"), NAMED)
def test_what_it_names_exists(file: str, function: str) -> None:
    path = ROOT / "dataflow" / file
    assert path.is_file()
    if function:
        assert function in defined(ast.parse(path.read_text(encoding="utf-8")))


def test_it_names_the_whole_way() -> None:
    assert len(NAMED) > 40


def test_each_question_names_at_most_4_files() -> None:
    questions = TEXT.split("## Questions")[1].split("\n## ")[0].strip().splitlines()[6:]
    assert len(questions) >= 16
    assert all(len(set(re.findall(r"[\w/]+\.(?:py|md)", row))) <= 4 for row in questions)


def test_each_of_the_three_ways_visits_at_most_8_files() -> None:
    ways = TEXT.split("## Three ways, file by file")[1].strip().splitlines()[2:]
    assert len(ways) == 3
    assert all(len(re.findall(r"`[\w/]+\.py`", way)) <= 8 for way in ways)
