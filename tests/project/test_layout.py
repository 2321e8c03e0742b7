"""The layout: folders that show at one look what is in them, and files of a length that is read in one go."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MODULES = [path for path in (ROOT / "dataflow").rglob("*.py") if not path.stem.startswith("__")]


def test_a_folder_has_at_most_12_modules() -> None:
    of_folder = Counter(path.parent.relative_to(ROOT).as_posix() for path in MODULES)
    assert {folder: count for folder, count in of_folder.items() if count > 12} == {}


def test_a_file_over_400_lines_is_named_with_its_reason() -> None:
    files = [*MODULES, *(ROOT / "pipelines").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    long = [path for path in files if len(path.read_text(encoding="utf-8").splitlines()) > 400]
    names = [path.relative_to(ROOT).as_posix().removeprefix("dataflow/") for path in long]
    assert [name for name in names if f"`{name}`" not in CONTRIBUTING] == []
