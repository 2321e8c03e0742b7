"""The page on pipelines: each file it shows runs, each command works, and each recipe is in its table."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path

import pytest

from dataflow.cli import main

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
FILES = {found[1]: found[0] for found in re.findall(r"```python\n(# (\w+\.py)\n.*?)```", TEXT, re.DOTALL)}
COMMANDS = re.findall(r"^dataflow .*$", TEXT, re.MULTILINE)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of the page in the working directory, which modules are imported from."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)


def test_each_block_of_python_is_a_file() -> None:
    assert len(FILES) == TEXT.count("```python") >= 4


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.split()[1:]
    assert words[1] in FILES
    assert main(words) == 0
    if words[0] == "run":
        assert (Path("runs") / f"{Path(words[1]).stem}-{_policy(words)}-1" / "timeline.html").is_file()
    else:
        shown = capsys.readouterr().out
        assert all(name in shown for name in ("draw", "train"))


@pytest.mark.slow
def test_the_script_prints_what_the_page_says() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(FILES["predict.py"], "predict.py", "exec"), {"__name__": "__main__"})
    lines = printed.getvalue().splitlines()
    for line in lines[:2]:
        assert line in TEXT
    assert Path("timeline.html").is_file()


def _policy(words: list[str]) -> str:
    return next((word.partition("=")[2] for word in words if word.startswith("policy=")), "both")
