"""The directory of a run, also of one whose process was killed at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.config.run import RunConfig
from dataflow.errors import ConfigError
from dataflow.running.directory import LOCK, check_directory, locked, make_directory


def config_of(runs: Path, mode: str) -> RunConfig:
    return RunConfig.model_validate({"runs": str(runs), "name": "a", "resume": {"mode": mode}})


@pytest.mark.parametrize("left", [(), (LOCK,), (LOCK, ".config.yaml.123")])
def test_auto_takes_the_directory_of_a_process_killed_before_it_began(left: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for name in left:
        (tmp_path / "a" / name).touch()
    check_directory(config_of(tmp_path, "auto"))
    assert make_directory(config_of(tmp_path, "auto"), "x") == tmp_path / "a"
    with pytest.raises(ConfigError, match="a exists; choose another name"):
        check_directory(config_of(tmp_path, "never"))
    with pytest.raises(ConfigError, match="a exists; choose another name"):
        make_directory(config_of(tmp_path, "never"), "x")


def test_auto_takes_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="a exists"):
        check_directory(config_of(tmp_path, "auto"))
    with pytest.raises(ConfigError, match="a exists"):
        make_directory(config_of(tmp_path, "auto"), "x")
    (tmp_path / "a" / "notes.txt").unlink()
    (tmp_path / "a").rmdir()
    (tmp_path / "a").write_text("a file")
    with pytest.raises(ConfigError, match="a exists"):
        make_directory(config_of(tmp_path, "auto"), "x")


def test_files_aside_of_killed_processes_are_removed(tmp_path: Path) -> None:
    for name in (".trace.json.123", ".summary.json.4", "trace.json", "metrics.jsonl.7"):
        (tmp_path / name).touch()
    with locked(tmp_path):
        assert sorted(file.name for file in tmp_path.iterdir()) == [LOCK, "metrics.jsonl.7", "trace.json"]


def test_a_run_that_is_going_on_is_named_with_its_process(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(ConfigError, match=r"is still running.*; wait for its end, or stop it\.$"), locked(tmp_path):
            pass
        (tmp_path / LOCK).write_text("123\n")
        with pytest.raises(ConfigError, match=r"is still running \(process 123\)"), locked(tmp_path):
            pass
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() != "123\n"
