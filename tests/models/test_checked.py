"""A model's weights are checked once, in a process of their own where this one has no torch."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.models import checked
from dataflow.models.checked import WeightsCheck

pytestmark = pytest.mark.heavy


@pytest.fixture
def model(tiny_qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny_qwen, tmp_path / "model"))


def test_what_was_found_right_is_not_checked_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with WeightsCheck(model) as check:
        check.wait()

    def twice(path: Path) -> list[str]:
        raise AssertionError("checked twice")

    monkeypatch.setattr(checked, "unused_weights", twice)
    with WeightsCheck(model) as check:
        check.wait()
    (model / "config.json").write_text((model / "config.json").read_text() + "\n")
    with WeightsCheck(model) as check, pytest.raises(AssertionError, match="checked twice"):
        check.wait()


APART = """
import sys
from pathlib import Path
from dataflow.errors import ModelError
from dataflow.models.checked import WeightsCheck
try:
    with WeightsCheck(Path(sys.argv[1])) as check:
        check.wait()
except ModelError as error:
    print(error)
assert "torch" not in sys.modules
"""


def test_a_process_without_torch_gets_the_same_sentence(model: Path) -> None:
    from safetensors.numpy import load_file, save_file

    def said() -> str:
        done = subprocess.run([sys.executable, "-c", APART, str(model)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert said() == ""
    weights = load_file(model / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, model / "model.safetensors")
    assert "weight 'model.norm.weight' is in none of its files" in said()
