"""A model that cannot be written: one sentence, and nothing half-written."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataflow.engines.verl.export import write_model
from dataflow.errors import ConfigError, RunError


@pytest.fixture
def _small_files() -> Iterator[None]:
    """Writing past 10 kB fails like writing to a full disk: room for the configuration, not for the weights."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.heavy
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.usefixtures("_small_files")
def test_weights_that_do_not_fit_on_the_disk(replace: bool, tmp_path: Path, tiny_qwen: Path) -> None:
    from safetensors.torch import load_file

    target = tmp_path / "model"
    with pytest.raises(
        RunError, match=rf"^model {target} cannot be written: .*; make room there, or give another place"
    ):
        write_model(load_file(tiny_qwen / "model.safetensors"), tiny_qwen, target, "a card", replace=replace)
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_a_place_where_no_directory_can_be_made(tmp_path: Path, tiny_qwen: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/model: .*file is not a directory; give another one\.$"):
        write_model(load_file(tiny_qwen / "model.safetensors"), tiny_qwen, tmp_path / "file" / "model", "a card")
