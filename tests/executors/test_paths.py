"""A service is not built on a node that does not see the files it uses: with nodes that see what the tests say."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import dataflow
from dataflow.errors import ConfigError
from dataflow.executors.ray.paths import SharedPaths, View, Where, difference, look


def model(directory: Path, weights: bytes = b"1234", **more: str) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights)
    for name, text in more.items():
        (directory / f"{name}.md").write_text(text)
    return directory


def test_a_difference_is_named(tmp_path: Path) -> None:
    mine = look(str(model(tmp_path / "a", README="mine")))
    assert difference(mine, look(str(model(tmp_path / "same", LICENSE="theirs")))) == ""
    assert difference(mine, look(str(tmp_path / "none"))) == "does not have it"
    assert difference(mine, look(str(model(tmp_path / "b", b"12345")))) == "has another model.safetensors there"
    os.unlink(model(tmp_path / "c") / "config.json")
    assert difference(mine, look(str(tmp_path / "c"))) == "lacks its file config.json"
    (tmp_path / "f").write_text("def compute_score(): return 1")
    (tmp_path / "g").write_text("def compute_score(): return 2")
    assert difference(look(str(tmp_path / "f")), look(str(tmp_path / "g"))) == "has another file there"
    assert difference(look(str(tmp_path / "f")), look(str(tmp_path / "f"))) == ""
    assert difference(look(str(tmp_path / "none")), look(str(tmp_path / "f"))) == ""  # the service reports it


class Elsewhere:
    """An actor on another node, whose disk has a directory in place of the root of this one."""

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self.look = SimpleNamespace(remote=self._look)

    def at(self, path: Path) -> Path:
        return self._disk / str(path).lstrip("/")

    async def _look(self, paths: Sequence[str]) -> list[View]:
        return [look(str(self.at(Path(path)))) for path in paths]


def checked(paths: SharedPaths, *actors: Any, version: str = dataflow.__version__) -> None:
    """Checks services on this node and on others."""
    where = [Where("here", "10.0.0.1", dataflow.__version__), *(Where("b", "10.0.0.2", version) for _ in actors)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dataflow.executors.ray.paths.log_nodes", lambda *_: None)
        asyncio.run(paths.check([None, *actors], where, "here"))


def test_a_file_that_a_node_lacks_or_has_an_older_copy_of_is_named_with_node_and_fix(tmp_path: Path) -> None:
    reward, node = tmp_path / "reward.py", Elsewhere(tmp_path / "disk")
    reward.write_text("def compute_score(*_): return 1.0")
    paths = SharedPaths("reward", files={"custom_reward_function.path": str(reward)})
    with pytest.raises(ConfigError) as caught:
        checked(paths, node)
    assert str(caught.value) == (
        f"custom_reward_function.path={reward}: node 10.0.0.2, where 'reward' runs, does not have it; put it on a "
        "disk that all nodes share, or copy it there."
    )
    copy = node.at(reward)
    copy.parent.mkdir(parents=True)
    copy.write_text("def compute_score(*_): return 0.0")
    with pytest.raises(ConfigError, match=r"node 10.0.0.2, where 'reward' runs, has another file there"):
        checked(paths, node)
    copy.write_text(reward.read_text())
    checked(paths, node)


def test_the_runs_directory_is_on_a_disk_that_the_nodes_share(tmp_path: Path) -> None:
    run, node = tmp_path / "runs" / "a", Elsewhere(tmp_path / "disk")
    run.mkdir(parents=True)
    node.at(run).mkdir(parents=True)  # of the same name, on another disk
    own = SharedPaths("trainer", directory=str(run))
    with pytest.raises(ConfigError) as caught:
        checked(own, node)
    assert str(caught.value) == (
        f"runs={run}: node 10.0.0.2, where 'trainer' runs, does not see this directory of this machine; give runs= on "
        "a disk that all nodes share, or ray.nodes.trainer labels of this machine's node."
    )
    checked(own, Elsewhere(Path("/")))
    assert list(run.iterdir()) == [], "the marker is gone"


def test_a_node_with_another_version_of_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"10\.0\.0\.2, where 'trainer' runs, has dataflow 0\.0, and this machine"):
        checked(SharedPaths("trainer"), Elsewhere(tmp_path), version="0.0")
