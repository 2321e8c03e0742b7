"""`dataflow init`: a project of one's own, whose own tests pass."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.commands import init as command

FILES = {"README.md", "config.yaml", "pipeline.py", "reward.py", "test_project.py"}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("active", [True, False])
def test_it_writes_a_project_named_after_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, active: bool
) -> None:
    monkeypatch.setattr(command, "which", lambda name: "/bin/dataflow" if active else None)
    called = "dataflow" if active else str(Path(sys.executable).with_name("dataflow"))
    place = tmp_path / "a" / "mine"
    assert main(["init", str(place)]) == 0
    assert {path.name for path in place.iterdir()} == FILES
    assert (place / "README.md").read_text().startswith("# mine\n")
    said = capsys.readouterr().out
    assert f"next: cd {place} && {called} run config.yaml dry=true && {called} run config.yaml steps=3" in said
    for name in FILES:
        assert f"`{name}`" in (place / "README.md").read_text() or name == "README.md"
    assert main(["show", str(place / "config.yaml")]) == 0
    assert "penalise_length" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["a file", "a file of the project"])
def test_it_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    place = tmp_path / "mine"
    if what == "a file":
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "reward.py").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["init", str(place)]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: init: ")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.heavy
@pytest.mark.timeout(180)
def test_its_own_tests_pass(tmp_path: Path, tiny_qwen: Path) -> None:
    place = tmp_path / "mine"
    assert main(["init", str(place)]) == 0
    config = place / "config.yaml"
    config.write_text(config.read_text().replace("path: null   ", f"path: {tiny_qwen}   "))
    assert str(tiny_qwen) in config.read_text()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_project.py"],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout
    assert "11 passed" in done.stdout
