"""The page on extending: each diff fits the tree, and its script prints with it what the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
CHANGES = re.findall(r"```diff\n(.*?)```.*?```python\n# (\w+\.py)\n(.*?)```\n\n```\n(.*?)```", TEXT, re.DOTALL)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_each_diff_has_a_script() -> None:
    assert len(CHANGES) == TEXT.count("```diff") == 2


@pytest.mark.parametrize(("diff", "name", "script", "output"), CHANGES, ids=[each[1] for each in CHANGES])
def test_a_change_does_what_the_page_says(diff: str, name: str, script: str, output: str, tmp_path: Path) -> None:
    for folder in ("dataflow", "pipelines"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    apply(diff, tmp_path)
    (tmp_path / name).write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, name],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def apply(diff: str, tree: Path) -> None:
    """Applies hunks without line numbers: each one's old lines are once in its file."""
    for file, hunks in re.findall(r"^--- a/.*\n\+\+\+ b/(.*)\n((?:(?!--- ).*\n)+)", diff, re.MULTILINE):
        path = tree / file
        text = path.read_text(encoding="utf-8")
        for hunk in hunks.split("@@\n")[1:]:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] or line for line in lines if not line.startswith("+"))
            new = "".join(line[1:] or line for line in lines if not line.startswith("-"))
            assert text.count(old) == 1, f"{file} has these lines {text.count(old)} times:\n{old}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
