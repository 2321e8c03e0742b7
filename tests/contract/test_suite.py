"""The suite outlives the code, as it knows nothing of its inside."""

from __future__ import annotations

import ast
from pathlib import Path

import dataflow


def imports(tree: ast.AST) -> set[str]:
    """Returns what a file imports, as ``module`` or ``module:name``; also lazily."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{'.' * node.level}{node.module or ''}:{alias.name}" for alias in node.names}
    return found


def forbidden(name: str) -> bool:
    module, _, member = name.partition(":")
    if module == "dataflow":
        return member != "" and member not in dataflow.__all__
    if module.startswith("tests."):
        return module != "tests.contract.rig"
    return module.split(".")[0] in ("dataflow", "pipelines", "benchmarks", "tests", "")


def test_nothing_below_the_public_names_is_imported() -> None:
    """A rewrite of the package would have to change the tests that say what it must not change."""
    for file in sorted(Path(__file__).parent.glob("*.py")):
        assert not [name for name in imports(ast.parse(file.read_text())) if forbidden(name)], file.name
