"""A service is not built on a node that does not see the files it uses: with nodes that see what the tests say."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dataflow.cluster.paths import View, Where, look, packed, unpack
from dataflow.cluster.shared_paths import SharedPaths, one_on_each
from dataflow.errors import ConfigError


class Elsewhere:
    """An actor on another node, whose disk has the directory ``disk`` in place of the root of this one.

    Args:
        disk: of the node.
        full: whether nothing can be written there.
    """

    def __init__(self, disk: Path, full: bool = False) -> None:
        self._disk, self._full = disk, full
        self.look = SimpleNamespace(remote=later(self._look))
        self.unpack = SimpleNamespace(remote=later(self._unpack))

    def at(self, path: str) -> str:
        return str(self._disk / path.lstrip("/"))

    def _look(self, paths: Sequence[str]) -> list[View]:
        return [look(self.at(path)) for path in paths]

    def _unpack(self, archive: bytes, path: str) -> None:
        if self._full:
            raise OSError(28, "No space left on device")
        unpack(archive, self.at(path))


def later(function: Callable[..., Any]) -> Callable[..., Any]:
    async def call(*arguments: Any) -> Any:
        return function(*arguments)

    return call


def checked(paths: SharedPaths, directory: str | None = None, **actors: Any) -> None:
    asyncio.run(replace(paths, directory=directory).check(actors))


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    file = tmp_path / "reward.py"
    file.write_text("def compute_score(*_): return 1.0")
    return file


def test_a_file_that_a_node_lacks_is_named_with_node_and_fix(tmp_path: Path, reward: Path) -> None:
    paths = SharedPaths("reward", files={"custom_reward_function.path": str(reward)})
    with pytest.raises(ConfigError) as caught:
        checked(paths, node7=Elsewhere(tmp_path / "disk"))
    assert str(caught.value) == (
        f"custom_reward_function.path={reward}: node node7, where 'reward' runs, does not have this file; put it on a "
        "disk that all nodes share, or copy it there."
    )


def test_an_older_copy_of_a_file_is_named(tmp_path: Path, reward: Path) -> None:
    node = Elsewhere(tmp_path / "disk")
    copy = Path(node.at(str(reward)))
    copy.parent.mkdir(parents=True)
    copy.write_text("def compute_score(*_): return 0.0")
    paths = SharedPaths("reward", files={"custom_reward_function.path": str(reward)})
    with pytest.raises(ConfigError, match="node node7, where 'reward' runs, has another file there"):
        checked(paths, node7=node)
    copy.write_text(reward.read_text())
    checked(paths, node7=node)


def test_a_run_directory_of_the_same_name_on_another_disk_is_not_shared(tmp_path: Path) -> None:
    run, node = tmp_path / "runs" / "a", Elsewhere(tmp_path / "disk")
    run.mkdir(parents=True)
    Path(node.at(str(run))).mkdir(parents=True)
    paths = SharedPaths("trainer")
    with pytest.raises(ConfigError) as caught:
        checked(paths, str(run), node7=node)
    assert str(caught.value) == (
        f"runs: node node7, where 'trainer' runs, does not see the run's directory {run}, which it has files in; give "
        "runs= a directory on a disk that all nodes share, or ray.nodes.trainer labels of this machine's node."
    )
    assert list(run.iterdir()) == []
    checked(paths, str(run), node7=Elsewhere(Path("/")))
    checked(paths, None, node7=node)  # it has no files there


def test_a_cache_must_be_on_a_disk_that_the_nodes_share(tmp_path: Path) -> None:
    cache, node = tmp_path / "caches" / "c.sqlite", Elsewhere(tmp_path / "disk")
    Path(node.at(str(tmp_path))).mkdir(parents=True)
    paths = SharedPaths("reward", writes={"reward.cache": str(cache)})
    run = tmp_path / "run"
    run.mkdir()
    with pytest.raises(ConfigError) as caught:
        checked(paths, node7=node)
    assert str(caught.value) == (
        f"reward.cache={cache}: node node7, where 'reward' runs, does not see the directory {tmp_path} of this "
        "machine; give a file on a disk that all nodes share, or ray.nodes.reward labels of this machine's node."
    )
    with pytest.raises(ConfigError, match=r"^runs: node node7"):
        checked(paths, str(run), node7=node)
    checked(paths, str(run), node7=Elsewhere(Path("/")))
    assert sorted(tmp_path.iterdir()) == [tmp_path / "disk", run]  # the markers are gone, and nothing is made


def test_a_model_that_the_run_has_made_is_copied(tmp_path: Path) -> None:
    model = tmp_path / "cache" / "tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    paths = SharedPaths("rollout", made={"model.path": str(model)})
    node = Elsewhere(tmp_path / "disk")
    checked(paths, node7=node)
    assert look(node.at(str(model))) == look(str(model))
    with pytest.raises(ConfigError, match=r"cannot be copied to node node8, .*No space left.*set XDG_CACHE_HOME"):
        checked(paths, node8=Elsewhere(tmp_path / "full", full=True))


def test_one_process_looks_for_each_other_node() -> None:
    nodes = [Where(*each, "1") for each in (("a", "10.0.0.1"), ("b", "10.0.0.2"), ("b", "10.0.0.2"), ("c", "10.0.0.2"))]
    assert one_on_each([0, 1, 2, 3], nodes, here="a") == {"10.0.0.2 (b)": 1, "10.0.0.2 (c)": 3}
    assert list(one_on_each([0, 1], nodes[:2], here=None)) == ["10.0.0.1", "10.0.0.2"]


def test_a_directory_that_two_processes_make_at_once_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").write_text("{}")
    archive, rename = packed(str(tmp_path / "a")), os.rename
    assert archive is not None

    def late(made: Path, place: Path) -> None:
        monkeypatch.undo()
        unpack(archive, str(place))
        rename(made, place)

    monkeypatch.setattr(os, "rename", late)
    unpack(archive, str(tmp_path / "b"))
    assert (tmp_path / "b" / "config.json").read_text() == "{}"
