"""`dataflow timeline`: what it prints and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.timeline import perfetto
from tests.rigs.made_up import made_up


@pytest.fixture
def run(tmp_path: Path) -> Path:
    trace = made_up(2)
    trace.meta.update(started=1.7e9)
    perfetto.write(trace, tmp_path / "trace.json")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.txt", "x.SVG"])
def test_a_file_is_written_beside_json_and_in_capitals(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run / name
    assert main(["timeline", str(run), "-o", str(out), "--json"]) == 0
    assert "worst_waits" in json.loads(capsys.readouterr().out)
    begin = {"txt": "gpu", "svg": "<?xml"}[name.lower().removeprefix("x.")]
    assert begin in out.read_text().lower()[:200]
    out.unlink()
    assert main(["timeline", str(run), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert out.is_file()


def test_another_kind_is_one_sentence(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", str(run), "-o", str(run / "x.gif")]) == 2
    assert "give a name in .html, .png, .svg, .txt." in capsys.readouterr().err
