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


@pytest.mark.parametrize("what", ["a file", "a file of the project", "below a file", "twice"])
def test_it_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str) -> None:
    place = tmp_path / "mine"
    if what in ("a file", "below a file"):
        place.write_text("mine")
        place = place / "project" if what == "below a file" else place
    elif what == "twice":
        assert main(["init", str(place)]) == 0
    else:
        place.mkdir()
        (place / "reward.py").write_text("mine")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["init", str(place)]) == 2
    assert capsys.readouterr().err.startswith("ConfigError: init: ")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_it_may_be_a_directory_with_other_files(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    assert main(["init", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == FILES | {".git"}


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


def test_a_misspelt_configuration_is_guessed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "mine"]) == 0
    monkeypatch.chdir("mine")
    assert main(["show", "confg.yaml"]) == 2
    assert capsys.readouterr().err == (
        "ConfigError: confg.yaml: No such file or directory; did you mean 'config.yaml'?\n"
    )
