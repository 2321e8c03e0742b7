"""Checkpoints on disk: no kill, no full disk and no rule loses the last whole one, and a torn one is never taken."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataflow.errors import ConfigError, DataError
from dataflow.running.saving.checkpoints import Checkpoint, CheckpointStore
from tests.rigs.checkpoints import Child, empty, killed_before_each_operation, names, save
from tests.rigs.logs import logged

pytestmark = pytest.mark.usefixtures("quick_disk")

FILES = ("manifest.json", "states.pkl", "trainer/.metadata", "trainer/__0_0.distcp")


def test_what_is_committed_is_found_with_all_that_was_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    copy = pickle.loads(pickle.dumps(store))  # that of another stage in the same process
    assert (store.newest(), store.whole()) == (None, [])
    store.keep(13, {"responses": [1, 2]})
    store.keep(14, ("x", 0.5))
    directory = store.begin(12)
    assert directory.name == f".step_000012.{os.getpid()}"
    assert store.newest() is None
    (directory / "trainer").mkdir()
    (directory / "trainer" / "a").write_bytes(b"abc")
    store.save_states(directory, {"actor": 12})
    for step in (13, 14):
        store.link(step, directory)
    size = copy.commit(12)
    assert store.newest() == store.at(12) == Checkpoint(store.directory / "step_000012", 12)
    found = store.newest()
    assert found is not None
    assert (found.service("trainer") / "a").read_bytes() == b"abc"
    assert found.states() == {"actor": 12}
    assert found.samples() == {13: {"responses": [1, 2]}, 14: ("x", 0.5)}
    assert size == sum(file.stat().st_size for file in found.path.rglob("*") if file.is_file())
    assert names(found.path.parent) == ["drawn", "step_000012"]
    assert (store.whole(), store.at(11)) == ([12], None)
    with pytest.raises(FileNotFoundError, match=r"step_000015\.pkl"):
        store.link(15, store.begin(14))


def test_a_directory_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").touch()
    with pytest.raises(ConfigError, match=r"checkpoints in .*checkpoints cannot be read \(Not a directory\)"):
        CheckpointStore(tmp_path / "checkpoints").newest()


def test_classes_of_no_module_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    space: dict[str, Any] = {"__name__": "a_pipeline_file"}
    exec("class Mine:\n    value = 3", space)
    CheckpointStore(tmp_path).save_states(tmp_path, {"mine": space["Mine"]()})
    checkpoint = Checkpoint(tmp_path, 1)
    assert checkpoint.states()["mine"].value == 3
    (tmp_path / "states.pkl").write_bytes(b"\x80\x05cno_such_module\nThing\n.")
    with pytest.raises(DataError, match=r"states.pkl cannot be read .*no_such_module"):
        checkpoint.states()


# Kills and full disks.


def train(directory: Path, steps: int, done: Callable[[int], object] = lambda step: None) -> None:
    """Saves a checkpoint of each step after the newest one, with samples of the next, and keeps one."""
    store = CheckpointStore(directory, keep_last=1, keep_best=0)
    found = store.newest()
    for step in range(found.step + 1 if found else 1, steps + 1):
        store.keep(step + 1, (step + 1, "drawn"))
        save(store, step)
        done(step)


def train_under_kills(place: str) -> None:
    """Checks what is left of two saves after a kill before each of their operations on files."""
    os.fsync = os.fdatasync = lambda _file: None
    train(Path(place, "warm"), 2)  # what is imported late is imported before the forks
    directory, said = Path(place, "checkpoints"), Path(place, "said")
    said.write_text("0")
    kills = 0
    for code in killed_before_each_operation(lambda: train(directory, 2, lambda done: said.write_text(str(done)))):
        assert code in (0, -9)
        kills += code == -9
        found = CheckpointStore(directory).newest()
        step = found.step if found else 0
        assert int(said.read_text() or "0") <= step <= 2, "the newest is whole, and none that was committed is lost"
        if found is not None:
            assert found.states() == {"actor": step, "pair": (step, "weights")}
            assert found.samples() == {step + 1: (step + 1, "drawn")}
        train(directory, step + 2)  # a new process tidies up
        assert names(directory) == ["drawn", f"step_{step + 2:06}"]
        assert names(directory / "drawn") == [f"step_{step + 3:06}.pkl"]
        shutil.rmtree(directory)
        said.write_text("0")
    assert kills > 40


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_kill_before_any_file_operation_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    assert Child(train_under_kills, str(tmp_path)).wait() == 0


def test_everything_is_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def name(path: object) -> str:
        return str(Path(str(path)).relative_to(tmp_path)).replace(str(os.getpid()), "PID")

    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(name(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(f"{name(a)} -> {name(b)}"), rename(a, b)))
    store = CheckpointStore(tmp_path / "c", keep_last=1)
    save(store, 1)
    done.clear()
    monkeypatch.setattr(shutil, "rmtree", lambda path: (rmtree(path), done.append(f"removed {name(path)}")))
    save(store, 2)
    aside = "c/.step_000002.PID"
    files = ("states.pkl", "trainer/.metadata", "trainer/__0_0.distcp", "manifest.json")
    assert done == [
        *(f"{aside}/{file}" for file in files),
        aside,
        f"{aside}/trainer",
        f"{aside} -> c/step_000002",
        "c",
        "c/step_000001 -> c/.step_000001.old",
        "c",
        "removed c/.step_000001.old",
    ]


# Torn checkpoints.


@pytest.mark.slow
@settings(deadline=None)  # the disk may be busy
@given(st.sampled_from(FILES), st.sampled_from(["cut", "flip", "delete", "directory", "add"]), st.floats(0, 1))
def test_a_torn_checkpoint_is_passed_over_with_a_warning(name: str, how: str, share: float) -> None:
    with empty() as directory:
        store = CheckpointStore(directory, keep_last=2)
        save(store, 1)
        save(store, 2)
        path = directory / "step_000002" / name
        data = path.read_bytes()
        at = min(int(share * len(data)), len(data) - 1)
        if how == "cut":
            path.write_bytes(data[:at])
        elif how == "flip":
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x80]) + data[at + 1 :])
        elif how == "add":
            path.with_name("new").touch()
        else:
            path.unlink()
            if how == "directory":
                path.mkdir()
        with logged() as warnings:
            found = store.newest()
        assert found is not None
        assert (found.step, found.states()) == (1, {"actor": 1, "pair": (1, "weights")})
        (message,) = warnings
        assert f"{directory / 'step_000002'} is not whole and is passed over: " in message
        save(store, 2, "again")
        assert store.newest() == store.at(2)


# Which are kept.


def test_samples_go_with_the_checkpoint_of_their_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 3, 4):
        store.keep(step, step)
    (tmp_path / "drawn" / ".step_000002.pkl.77").touch()  # of a killed process
    save(store, 3)
    assert names(tmp_path / "drawn") == ["step_000004.pkl"]


def test_the_newest_the_best_and_every_so_many_are_kept(tmp_path: Path) -> None:
    def rate(step: int, **scores: float | None) -> None:
        row = {"step": step, "actor/loss": 9.0, **{f"val-core/{name}/reward/mean@1": s for name, s in scores.items()}}
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    rate(1, a=0.9, b=0.1)
    rate(2, a=0.5)
    rate(2, b=0.7)  # the mean of both rows' scores is 0.6
    rate(3, a=0.6, b=None)
    rate(4, a=None)
    for rules, kept in (
        ({"keep_best": 1}, [3, 6]),
        ({"keep_best": 9}, [1, 2, 3, 6]),
        ({"keep_last": 3, "keep_best": 0}, [4, 5, 6]),
        ({"keep_best": 0, "keep_every": 2}, [2, 4, 6]),
    ):
        directory = tmp_path / "checkpoints"
        for step in range(1, 6):
            save(CheckpointStore(directory, keep_last=9), step)
        save(CheckpointStore(directory, **{"keep_last": 1, **rules}), 6)
        assert CheckpointStore(directory).whole() == kept
        shutil.rmtree(directory)


def test_a_run_that_resumes_from_an_earlier_checkpoint_drops_the_later_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in (2, 5, 3):
        save(store, step)
    assert store.whole() == [2, 3]
