"""docs/recipes.md has a row for each recipe, with the numbers of the curves that are kept beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
CURVES = json.loads((ROOT / "docs" / "recipes.json").read_text(encoding="utf-8"))
ROWS = {
    found[1]: found[2].split(" | ")
    for found in re.finditer(r"^\| \[`(\w+)\.py`\]\(\.\./pipelines/\1\.py\) \| (.*) \|$", TEXT, re.MULTILINE)
}


def test_each_recipe_has_a_row_and_three_curves() -> None:
    recipes = {path.stem for path in (ROOT / "pipelines").glob("*.py")}
    assert set(ROWS) == set(CURVES) == recipes
    assert all(set(curves) == {"0", "1", "2"} for curves in CURVES.values())


def test_the_numbers_are_those_of_the_curves_and_each_has_learned() -> None:
    for recipe, curves in CURVES.items():
        after = [(curve["15"] + curve["20"]) / 2 for curve in curves.values()]
        before = [curve["0"] for curve in curves.values()]
        assert ROWS[recipe] == [f"{before[0]:.2f}", *(f"{each:.2f}" for each in after)], recipe
        assert min(after) - max(before) >= 0.10, recipe


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
    for command in re.findall(r"^    \.venv/bin/python (\S+)", TEXT, re.MULTILINE):
        assert (ROOT / command).is_file(), command
