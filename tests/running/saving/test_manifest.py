"""A torn checkpoint is never taken for whole, and the warning says what is wrong with it."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger

from dataflow.running.saving import checkpoints, manifest
from dataflow.running.saving.checkpoints import CheckpointStore
from tests.rigs.checkpoints import empty, save
from tests.rigs.logs import logged

FILES = ("manifest.json", "states.pkl", "trainer/.metadata", "trainer/__0_0.distcp")


def tear(path: Path, how: str, share: float, mask: int) -> str:
    """Damages a checkpoint; returns a word of the message that says so."""
    data = path.read_bytes()
    at = min(int(share * len(data)), len(data) - 1)
    if how == "cut":
        path.write_bytes(data[:at])
    elif how == "flip":
        path.write_bytes(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
    elif how == "longer":
        path.write_bytes(data + bytes([mask]))
    elif how == "delete":
        path.unlink()
    elif how == "directory":
        path.unlink()
        path.mkdir()
    elif how == "link":
        shutil.copy(path, path.parents[3] / "elsewhere")
        path.unlink()
        path.symlink_to(path.parents[3] / "elsewhere")
    elif how == "add":
        path = path.with_name(path.name + ".new")
        path.write_bytes(b"")
    return path.name


@pytest.mark.slow
@settings(deadline=None)  # the disk may be busy
@given(
    st.sampled_from(FILES),
    st.sampled_from(["cut", "flip", "longer", "delete", "directory", "add"]),
    st.floats(0, 1),
    st.integers(1, 255),
)
def test_a_torn_checkpoint_is_passed_over(name: str, how: str, share: float, mask: int) -> None:
    with empty() as directory:
        store = CheckpointStore(directory, keep_last=2)
        save(store, 1)
        save(store, 2)
        damaged = tear(directory / "step_000002" / name, how, share, mask)
        with logged() as warnings:
            found = store.newest()
        assert found is not None
        assert (found.step, found.states()) == (1, {"actor": 1, "pair": (1, "weights")})
        (message,) = warnings
        assert f"{directory / 'step_000002'} is not whole and is passed over: " in message
        assert damaged in message
        shutil.rmtree(directory / "step_000001")
        assert store.newest() is None


@pytest.mark.parametrize("name", FILES)
def test_no_byte_of_a_checkpoint_can_be_flipped_or_cut_off_unnoticed(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    path = tmp_path / "step_000001" / name
    data = path.read_bytes()
    draw = random.Random(name)
    logger.disable("dataflow.running.saving.checkpoints")  # most of the time is spent on its warnings
    try:
        for at in range(len(data)):
            path.write_bytes(data[:at])
            assert store.newest() is None, f"cut at {at}"
            flipped = bytes([data[at] ^ draw.randrange(1, 256)])
            path.write_bytes(data[:at] + flipped + data[at + 1 :])
            assert store.newest() is None, f"{flipped!r} at {at}"
    finally:
        logger.enable("dataflow.running.saving.checkpoints")
    path.write_bytes(data)
    assert store.newest() is not None


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda d: (d / "trainer" / "__0_0.distcp").write_bytes(b"x"),
            "trainer/__0_0.distcp has 1 bytes instead of 17",
        ),
        (lambda d: (d / "states.pkl").unlink(), "states.pkl is missing"),
        (lambda d: (d / "trainer" / "new").touch(), "trainer/new is not in the manifest"),
        (lambda d: (d / "manifest.json").unlink(), "manifest.json is missing"),
        (
            lambda d: ((d / "manifest.json").unlink(), os.mkfifo(d / "manifest.json")),
            "manifest.json is no regular file",
        ),
        (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json is cut off or changed"),
        (lambda d: (d / "manifest.json").write_text('{"step": 1}'), "manifest.json is cut off or changed"),
        (lambda d: tear(d / "trainer" / ".metadata", "link", 0, 0), "trainer/.metadata is no regular file"),
        (lambda d: tear(d / "trainer" / ".metadata", "flip", 0, 1), "the contents of trainer/.metadata have changed"),
        (lambda d: shutil.rmtree(d / "trainer"), "trainer/.metadata is missing"),
        (lambda d: (shutil.rmtree(d), d.touch()), "manifest.json cannot be read (Not a directory)"),
        (lambda d: (shutil.rmtree(d), d.symlink_to("nowhere")), "manifest.json is missing"),
        (lambda d: (shutil.rmtree(d), shutil.copytree(d.with_name("step_000001"), d)), "that of step 1"),
    ],
)
def test_the_warning_names_the_defect(tmp_path: Path, damage: Any, message: str) -> None:
    directory = tmp_path / "checkpoints"
    store = CheckpointStore(directory)
    save(store, 1)
    save(store, 2)
    damage(directory / "step_000002")
    with logged() as warnings:
        found = store.newest()
    assert found is not None
    assert found.step == 1
    assert len(warnings) == 1
    assert f"{message}." in warnings[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all files")
def test_a_file_that_may_not_be_read_is_torn(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    (tmp_path / "step_000001" / "states.pkl").chmod(0)
    with logged() as warnings:
        assert store.newest() is None
    assert "states.pkl cannot be read (Permission denied)" in warnings[0]


def test_other_names_are_no_checkpoints(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 2_000_000)
    for name in ("step_12", "step_0000012", "step_000012_copy", "step_-00001", ".step_000099", "drawn"):
        (tmp_path / name).mkdir()
    with logged() as warnings:
        assert store.whole() == [2_000_000]
        found = store.newest()
    assert found is not None
    assert found.step == 2_000_000
    assert warnings == []


def test_a_checkpoint_that_is_removed_while_it_is_read_makes_way_for_a_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    read = checkpoints.read_manifest

    def meanwhile(directory: Path) -> manifest.Manifest:
        monkeypatch.setattr(checkpoints, "read_manifest", read)
        save(store, 2)
        return read(directory)

    monkeypatch.setattr(checkpoints, "read_manifest", meanwhile)
    with logged() as warnings:
        found = store.newest()
    assert found is not None
    assert (found.step, warnings) == (2, [])
