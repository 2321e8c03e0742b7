"""The files of the weights: only what an engine has written is ever removed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from dataflow.engines.servers.weights_files import MARKER, WeightsFiles, check_directory, name_of, remove_weights
from dataflow.errors import ConfigError, RunError

WEIGHTS = {"a": torch.ones(3)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a configuration."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def test_files_of_others_are_never_removed(tmp_path: Path, model: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    check_directory(place)
    (place / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match=r"engine\.weights_dir: .*mine is .* holds other files; move them elsewhere"):
        WeightsFiles(place, model, "one")
    assert (place / "thesis.tex").read_text() == "years of work"


def test_a_file_that_comes_later_stays(tmp_path: Path, model: Path) -> None:
    files = WeightsFiles(tmp_path / "w", model, "one")
    first = files.write(WEIGHTS, "version-1-abcdef")
    (tmp_path / "w" / "note").write_text("mine")
    files.keep(files.write(WEIGHTS, "version-2-abcdef"))
    assert not first.exists()
    remove_weights(tmp_path / "w", "one")
    assert {file.name for file in (tmp_path / "w").iterdir()} == {"note", MARKER}
    assert WeightsFiles(tmp_path / "w", model, "two").write(WEIGHTS, "version-3-abcdef").is_dir()


def test_what_a_user_names_like_a_version_stays(tmp_path: Path, model: Path) -> None:
    place = tmp_path / "w"
    files = WeightsFiles(place, model, "one")
    files.keep(files.write(WEIGHTS, name_of(3)))
    (place / "version-3-my-best").mkdir()
    (place / "version-3-abcdef.txt").write_text("mine")
    (place / "version-4-abcdef").write_text("mine")
    (place / "version-5-abcdef.part").mkdir()
    remove_weights(place, "one")
    mine = {"version-3-my-best", "version-3-abcdef.txt", "version-4-abcdef"}
    assert {file.name for file in place.iterdir()} == {*mine, MARKER}


def test_a_directory_that_is_taken_over_during_the_removal_stays(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WeightsFiles(tmp_path / "w", model, "one").write(WEIGHTS, name_of(1))
    remove = shutil.rmtree

    def slow(path: Path, ignore_errors: bool) -> None:
        monkeypatch.undo()
        remove(path, ignore_errors=ignore_errors)
        WeightsFiles(tmp_path / "w", model, "two")

    monkeypatch.setattr(shutil, "rmtree", slow)
    remove_weights(tmp_path / "w", "one")
    assert (tmp_path / "w" / MARKER).read_text() == "two"


def test_an_engine_takes_over_what_an_earlier_one_left(tmp_path: Path, model: Path) -> None:
    first = WeightsFiles(tmp_path / "w", model, "one")
    left = first.write(WEIGHTS, "version-1-abcdef")
    second = WeightsFiles(tmp_path / "w", model, "two")
    assert not left.exists()
    written = second.write(WEIGHTS, "version-1-abcdef")
    with pytest.raises(RunError, match=r"another run writes its weights to .*; end one of the two"):
        first.write(WEIGHTS, "version-2-abcdef")
    remove_weights(tmp_path / "w", "one")
    assert written.is_dir()
    remove_weights(tmp_path / "w", "two")
    assert not (tmp_path / "w").exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, model: Path) -> None:
    files = WeightsFiles(tmp_path / "w", model, "one")
    (tmp_path / "w" / "version-1-abcdef").write_text("in the way")
    with pytest.raises(RunError, match="cannot be written to"):
        files.write(WEIGHTS, "version-1-abcdef")
    assert not list((tmp_path / "w").glob("*.part"))
