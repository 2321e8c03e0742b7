"""The notebook of examples/ runs from top to bottom, and what its cells end with shows itself."""

from __future__ import annotations

import ast
import asyncio
import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def last_value(source: str, names: dict[str, Any]) -> Any:
    """Runs a cell; returns the value of its last line if that is an expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names) if isinstance(last, ast.Expr) else None


@pytest.mark.slow
def test_the_notebook_runs_and_its_results_show_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "costs.yaml").write_text((EXAMPLES / "costs.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"__name__": "notebook"}

    async def run_all() -> list[Any]:  # a notebook's cells run beside its event loop
        return [last_value("".join(cell["source"]), names) for cell in cells if cell["cell_type"] == "code"]

    values = asyncio.run(run_all())
    pages = [value._repr_html_() for value in values if value is not None]
    assert [type(value).__name__ for value in values if value is not None] == ["Run", "Trace", "Plan"]
    for page, word in zip(pages, ("finished: runs/", "GPU pool idle", "advice:"), strict=True):
        assert word in page
        assert "<script" not in page
        (picture,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
        assert base64.b64decode(picture).startswith(b"\x89PNG")
        assert len(page) < 1_000_000


def test_no_cell_was_saved_with_its_output() -> None:
    cells = json.loads((EXAMPLES / "tour.ipynb").read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
