"""What two processes see at the same paths."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataflow.cluster.paths import View, difference, look, marked, packed, unpack
from dataflow.running.directory import remove_temporary


def model(directory: Path, weights: bytes = b"1234", **more: str) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    for name, text in more.items():
        (directory / f"{name}.md").write_text(text)
    return directory


def test_equal_models_do_not_differ_whatever_is_beside_their_files(tmp_path: Path) -> None:
    here, there = model(tmp_path / "a", README="mine"), model(tmp_path / "b", LICENSE="theirs")
    assert difference(look(str(here)), look(str(there))) == ""


def test_a_difference_is_named(tmp_path: Path) -> None:
    mine = look(str(model(tmp_path / "a")))
    assert difference(mine, look(str(tmp_path / "none"))) == "does not have this directory"
    assert difference(mine, look(str(model(tmp_path / "b", b"12345")))) == "has another model.safetensors there"
    os.unlink(model(tmp_path / "c") / "config.json")
    assert difference(mine, look(str(tmp_path / "c"))) == "lacks its file config.json"
    (tmp_path / "f").write_text("def compute_score(): return 1")
    (tmp_path / "g").write_text("def compute_score(): return 2")
    assert difference(mine, look(str(tmp_path / "f"))) == "has a file there, not a directory"
    assert difference(look(str(tmp_path / "f")), look(str(tmp_path / "g"))) == "has another file there"
    assert difference(look(str(tmp_path / "f")), look(str(tmp_path / "f"))) == ""


def test_what_this_process_does_not_see_is_left_to_who_reads_it(tmp_path: Path) -> None:
    assert difference(look(str(tmp_path / "none")), View("file", "x")) == ""


def test_a_marker_is_removed_by_the_run_even_if_its_process_was_killed(tmp_path: Path) -> None:
    with marked(str(tmp_path)) as marker:
        assert look(marker).kind == "file"
    assert look(marker).kind == ""
    Path(marker).touch()
    remove_temporary(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_is_sent_whole_and_never_over_another(tmp_path: Path) -> None:
    here = model(tmp_path / "a")
    (tmp_path / "link").symlink_to(here / "config.json")
    os.rename(tmp_path / "link", here / "tokenizer.json")  # as in the hub's cache
    archive = packed(str(here))
    assert archive is not None
    there = tmp_path / "cache" / "deep" / "model"
    unpack(archive, str(there))
    assert look(str(there)).sizes == look(str(here)).sizes
    assert not (there / "tokenizer.json").is_symlink()
    (there / "config.json").write_text("other")
    unpack(archive, str(there))
    assert (there / "config.json").read_text() == "other"
    assert [each.name for each in there.parent.iterdir()] == ["model"]


def test_a_large_directory_is_not_sent(tmp_path: Path) -> None:
    with open(model(tmp_path / "a") / "model.safetensors", "wb") as file:
        file.truncate(1 << 27)
    assert packed(str(tmp_path / "a")) is None


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    archive = packed(str(model(tmp_path / "a")))
    assert archive is not None
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"Not a directory|File exists"):
        unpack(archive, str(tmp_path / "file" / "model"))
