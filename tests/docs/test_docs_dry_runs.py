"""docs/dry_runs.md and recipes/README.md: each line of a dry run is explained, links and Python hold."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dataflow.running.preparing import needs, preparation

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "dry_runs.md", ROOT / "recipes" / "README.md")
TEXT = PAGES[0].read_text(encoding="utf-8")


def test_each_line_of_a_dry_run_is_explained() -> None:
    source = "".join(Path(str(module.__file__)).read_text() for module in (needs, preparation))
    named = set(re.findall(r'Check\("([\w ]+)"', source))
    assert {"engine", "GPU memory", "prompts"} <= named
    explained = set(re.findall(r"`([\w ]+)`", "".join(re.findall(r"^\| (`[^|]*) \|", TEXT, re.MULTILINE))))
    assert named <= explained | {"judge of "}, named - explained


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_recipes_are_all_listed() -> None:
    listed = set(re.findall(r"\]\(([\w.+-]+\.yaml)\)", PAGES[1].read_text()))
    assert listed == {path.name for path in (ROOT / "recipes").glob("*.yaml")}


def test_its_python_finds_the_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert code is not None
    monkeypatch.chdir(ROOT)
    names: dict[str, list[str]] = {}
    exec(code[1], names)
    assert names["problems"] == ["train.jsonl: there is no such file; give a data file."]
