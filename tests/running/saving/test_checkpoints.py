"""Checkpoints on disk: no kill, no full disk and no rule loses the last whole one or leaves anything behind."""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dataflow.config.run import RunConfig, parse_overrides
from dataflow.errors import ConfigError, DataError
from dataflow.running.saving import checkpoints
from dataflow.running.saving.checkpoints import CheckpointStore, checkpoint_store
from tests.rigs.checkpoints import Child, killed_before_each_operation, names, save
from tests.rigs.logs import logged


def test_what_is_committed_is_found_with_all_that_was_written(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.newest() is None
    assert store.whole() == []
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
    size = store.commit(12, {"max_staleness": 2, "lr": 0.1, "pair": (1, 2), 3: None})
    found = store.newest()
    assert found is not None
    assert found.path == tmp_path / "run" / "checkpoints" / "step_000012"
    assert found.step == 12
    assert found.facts == {"max_staleness": 2, "lr": 0.1, "pair": [1, 2], "3": None}
    assert (found.trainer / "a").read_bytes() == b"abc"
    assert found.states() == {"actor": 12}
    assert found.samples() == {13: {"responses": [1, 2]}, 14: ("x", 0.5)}
    assert size == sum(file.stat().st_size for file in found.path.rglob("*") if file.is_file())
    assert names(found.path.parent) == ["drawn", "step_000012"]
    assert store.whole() == [12]


def test_copies_of_a_store_in_one_process_write_together(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    copy = pickle.loads(pickle.dumps(store))
    (store.begin(1) / "a").write_text("x")
    copy.commit(1, {})
    store.begin(2)
    copy.discard(2)
    assert names(tmp_path) == ["step_000001"]
    assert vars(copy) == vars(store)
    assert not checkpoints._HELD


def test_classes_of_no_module_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    space: dict[str, Any] = {"__name__": "a_pipeline_file"}
    exec("class Mine:\n    value = 3", space)
    store = CheckpointStore(tmp_path)
    store.save_states(tmp_path, {"mine": space["Mine"]()})
    checkpoint = checkpoints.Checkpoint(tmp_path, 1, {})
    assert checkpoint.states()["mine"].value == 3
    (tmp_path / "states.pkl").write_bytes(b"\x80\x05cno_such_module\nThing\n.")
    with pytest.raises(DataError, match=r"states.pkl cannot be read .*no_such_module"):
        checkpoint.states()


def test_the_configuration_determines_which_checkpoints_are_kept(tmp_path: Path) -> None:
    arguments = ["checkpoint.keep_last=5", "checkpoint.keep_best=0", "checkpoint.keep_every=7"]
    store = checkpoint_store(parse_overrides(RunConfig, [f"runs={tmp_path}", "name=x", *arguments]))
    assert (store.directory, store.keep_last, store.keep_best, store.keep_every) == (
        tmp_path / "x" / "checkpoints", 5, 0, 7,
    )  # fmt: skip
    assert not (tmp_path / "x").exists()
    for key, value in (("keep_last", 0), ("max_failed", 0), ("every", -1), ("grace_s", -1)):
        with pytest.raises(ConfigError, match=f"checkpoint.{key}={value}: give a number"):
            parse_overrides(RunConfig, [f"checkpoint.{key}={value}"])
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_last=0: give 1 or more"):
        CheckpointStore(tmp_path, keep_last=0)


# Kills.


def train(directory: Path, steps: int, done: Callable[[int], object] = lambda step: None, size: int = 10) -> None:
    """Saves a checkpoint of each step after the newest one, with samples of the next, and keeps one."""
    store = CheckpointStore(directory, keep_last=1, keep_best=0)
    found = store.newest()
    for step in range(found.step + 1 if found else 1, steps + 1):
        store.keep(step + 1, (step + 1, "drawn" * size))
        save(store, step, "x" * size)
        done(step)


def check_after_kill(directory: Path, least: int, most: int, size: int = 10) -> None:
    """Checks that the newest checkpoint is one of some steps, that it is whole, and that a new process tidies up."""
    found = CheckpointStore(directory).newest()
    step = found.step if found else 0
    assert least <= step <= most
    if found is not None:
        assert found.states() == {"actor": step, "pair": (step, "x" * size)}
        assert found.samples() == {step + 1: (step + 1, "drawn" * size)}
        assert (found.trainer / "__0_0.distcp").read_bytes() == f"{'x' * size} of step {step}".encode()
    train(directory, step + 2, size=size)
    assert names(directory) == ["drawn", f"step_{step + 2:06}"]
    assert names(directory / "drawn") == [f"step_{step + 3:06}.pkl"]


def train_under_kills(place: str) -> None:
    """Checks what is left of two saves after a kill before each of their operations on files."""
    os.fsync = os.fdatasync = lambda _file: None
    train(Path(place, "warm"), 2)  # what is imported late is imported before the forks
    directory, said = Path(place, "checkpoints"), Path(place, "said")
    said.write_text("0")
    kills = 0
    for code in killed_before_each_operation(lambda: train(directory, 2, lambda step: said.write_text(str(step)))):
        assert code in (0, -9)
        kills += code == -9
        check_after_kill(directory, int(said.read_text() or "0"), 2)
        shutil.rmtree(directory)
        said.write_text("0")
    assert kills > 60


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_kill_before_any_file_operation_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    assert Child(train_under_kills, str(tmp_path)).wait() == 0


def commit_late(step: str, directory: str, write: str, go_on: str) -> None:
    """Begins a checkpoint, says so, and commits it when it is told to."""
    store = CheckpointStore(Path(directory))
    (store.begin(int(step)) / "a").write_text("x")
    os.write(int(write), b".")
    os.read(int(go_on), 1)
    store.commit(int(step), {})


@pytest.mark.timeout(60)
def test_a_directory_aside_is_removed_if_its_writer_is_dead(tmp_path: Path) -> None:
    read, write = os.pipe()
    go_on, go = os.pipe()
    arguments = (str(tmp_path), str(write), str(go_on))
    store = CheckpointStore(tmp_path, keep_last=3)
    with (
        Child(commit_late, "1", *arguments, pass_fds=(write, go_on)) as living,
        Child(commit_late, "2", *arguments, pass_fds=(write, go_on)) as dying,
    ):
        os.close(write)
        assert len(os.read(read, 1) + os.read(read, 1)) == 2
        aside = [f".step_000001.{living.pid}", f".step_000002.{dying.pid}"]
        store.begin(3)
        assert names(tmp_path) == [*aside, f".step_000003.{os.getpid()}"]
        dying.kill()
        # Another process with the id of a dead one is no reason to keep its directory.
        (tmp_path / f".step_000004.{os.getpid()}").mkdir()
        (tmp_path / ".step_000005.1.old").mkdir()
        store.begin(6)
        assert names(tmp_path) == [aside[0], *(f".step_00000{step}.{os.getpid()}" for step in (3, 6))]
        os.write(go, b".")
        assert living.wait() == 0
    for end in (read, go_on, go):
        os.close(end)
    store.discard(3)
    store.discard(6)
    store.discard(7)
    assert names(tmp_path) == ["step_000001"]
    assert not checkpoints._HELD


def test_where_directories_cannot_be_locked_those_of_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, operation: int) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    store = CheckpointStore(tmp_path)
    (tmp_path / ".step_000001.1").mkdir()
    store.begin(2)
    with logged() as warnings:
        save(store, 3)
        store.commit(2, {})
    assert names(tmp_path) == [".step_000001.1", "step_000002"]
    (message,) = warnings
    assert f"{tmp_path / '.step_000001.1'} may still be written (Bad file descriptor)" in message


# What is on the disk, and when.


def test_everything_is_on_the_disk_before_a_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, rename, rmtree = os.fsync, os.rename, shutil.rmtree

    def name(path: object) -> str:
        return str(Path(str(path)).relative_to(tmp_path)).replace(str(os.getpid()), "PID")

    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(name(os.readlink(f"/proc/self/fd/{fd}"))), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append(f"{name(a)} -> {name(b)}"), rename(a, b)))
    monkeypatch.setattr(shutil, "rmtree", lambda path: (done.append(f"remove {name(path)}"), rmtree(path)))
    store = CheckpointStore(tmp_path / "c", keep_last=1)
    save(store, 1)
    done.clear()
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
        "remove c/.step_000001.old",
    ]


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Lets files of this process grow to a size only, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fill(place: str) -> None:
    """Fails to write a checkpoint and samples, then writes both."""
    directory = Path(place)
    store = CheckpointStore(directory, keep_last=3)
    save(store, 1)
    store.keep(2, "small")
    before = names(directory)
    aside = store.begin(2)
    for number in range(50):
        (aside / f"{number}").write_text("x")
    with files_up_to(4000):
        with pytest.raises(OSError, match="File too large"):
            store.commit(2, {})  # of all files, only the manifest is longer
        assert names(directory) == before
        with pytest.raises(OSError, match="File too large"):
            store.save_states(store.begin(2), {"actor": "x" * 5000})
        store.discard(2)
        assert names(directory) == before
        with pytest.raises(OSError, match="File too large"):
            store.keep(2, "x" * 5000)
        assert names(directory / "drawn") == ["step_000002.pkl"]
        with logged() as warnings:
            found = store.newest()
    assert found is not None
    assert (found.step, warnings) == (1, [])
    store.link(2, store.begin(1))
    store.discard(1)
    save(store, 2)
    assert store.whole() == [1, 2]


@pytest.mark.timeout(60)
def test_a_full_disk_costs_one_checkpoint_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert Child(fill, str(tmp_path)).wait() == 0


def test_facts_that_json_cannot_hold_leave_nothing_behind(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for facts, error in (({"a": object()}, TypeError), ({"a": float("nan")}, ValueError)):
        store.begin(1)
        with pytest.raises(error):
            store.commit(1, facts)
    assert names(tmp_path) == []


def test_samples_that_were_not_kept_cannot_be_linked(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"step_000002\.pkl"):
        store.link(2, store.begin(1))
    store.discard(1)


def test_samples_are_copied_where_there_are_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    store = CheckpointStore(tmp_path)
    store.keep(2, "drawn")
    save(store, 1)
    found = store.newest()
    assert found is not None
    assert found.samples() == {2: "drawn"}
