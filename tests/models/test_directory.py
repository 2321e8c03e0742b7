"""A model's directory: if something is missing, damaged or of another kind, one sentence says so before a start."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dataflow.errors import ModelError, NotChecked
from dataflow.models.directory import (
    INDEX,
    WEIGHTS,
    check_files,
    check_model,
    check_weights,
    here_only,
    labels_of,
    room_of,
)

CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 8, "max_position_embeddings": 32}
NAMES = ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Files that look like a model's: enough for a check of their headers."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file({name: np.zeros((8, 4), np.float32) for name in NAMES}, path / WEIGHTS)
    return path


def refused(path: Path, check: Callable[[Path], object] = check_model) -> str:
    with pytest.raises(ModelError) as caught:
        check(path)
    said = str(caught.value)
    assert "\n" not in said
    assert str(path) in said
    return said


def test_files_that_are_whole_pass(model: Path) -> None:
    assert check_model(model) == model
    assert (room_of(model).positions, room_of(model).vocabulary) == (32, 8)


@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[:-1], lambda whole: b"version https://git-lfs"],
    ids=["cut", "a Git LFS pointer"],
)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_or_missing_file_of_weights_is_named(
    model: Path, damage: Callable[[bytes], bytes], sharded: bool
) -> None:
    file = model / WEIGHTS
    if sharded:
        file = file.rename(model / "model-00001-of-00001.safetensors")
        (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, file.name)}))
        check_model(model)
    file.write_bytes(damage(file.read_bytes()))
    assert f"weights {file} cannot be read" in refused(model)
    file.unlink()
    assert f"weights {file} cannot be read (No such file or directory" in refused(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["Qwen2ForSequenceClassification"]}, " is a Qwen2ForSequenceClassification; give one whose"),
        ({"architectures": None}, "is a model without architectures"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized"),
    ],
)
def test_another_kind_of_model_is_refused(model: Path, change: dict[str, Any], message: str) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert message in refused(model)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json cannot be read (No such file"),
        ("{", "config.json cannot be read"),
        ("[1]", "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_named(model: Path, content: str | None, message: str) -> None:
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)
    assert message in refused(model)


@pytest.mark.parametrize(
    ("kind", "architecture", "answer"),
    [
        ("classify", "Qwen2ForSequenceClassification", 1),
        ("classify", "Qwen2ForCausalLM", "is a Qwen2ForCausalLM; give one whose config.json names"),
        ("pooling", "Qwen2ForTokenClassification", 1),
        ("pooling", "Qwen2ForRewardModel", None),
    ],
)
def test_a_reward_model_has_a_head(model: Path, kind: str, architecture: str, answer: int | str | None) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "architectures": [architecture], "num_labels": 1}))
    if isinstance(answer, str):
        assert answer in refused(model, lambda path: check_files(path, kind))
    else:
        assert labels_of(check_files(model, kind)) == answer


@pytest.mark.parametrize("path", ["./foo", "/foo", "a/b/c", ""])
def test_a_missing_path_is_said_without_asking_the_hub(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ModelError, match=f"^model.path={re.escape(path)} does not exist"):
        check_model(path)


def test_a_name_on_the_hub_gives_its_directory_or_one_sentence(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, local_files_only: bool, **_: Any) -> str:
        if local_files_only or name == "no/such":
            raise ValueError("404 Not found\nurl")
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert check_model("org/name") == model
    with pytest.raises(ModelError, match=r"^critic.path=no/such is not a local directory.*hub \(404 Not found\)\.$"):
        check_model("no/such", "critic.path")
    with here_only(), pytest.raises(NotChecked, match="org/name is not on this machine; a start downloads it"):
        check_model("org/name")
    with pytest.raises(ModelError, match="is a file; give the model's directory"):
        check_model(model / "config.json")


Q = "model.layers.0.self_attn.q_proj.weight"
CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    f"1 of its weights are not as its config.json says, first '{Q}' is [3, 3] and not [32": lambda w: {
        **w,
        Q: np.zeros((3, 3), np.float32),
    },
    "' is missing; take both": lambda w: {"foo": w[Q]},
}


@pytest.mark.heavy
@pytest.mark.parametrize("message", CHANGES)
def test_weights_have_the_names_and_shapes_of_the_architecture(tiny_qwen: Path, tmp_path: Path, message: str) -> None:
    path = Path(shutil.copytree(tiny_qwen, tmp_path / "model"))
    check_weights(path)
    save_file(CHANGES[message](load_file(path / WEIGHTS)), path / WEIGHTS)
    assert message in refused(path, check_weights)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"model_type": "qwen9"},
        {"model_type": "x", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}},
    ],
)
def test_a_configuration_of_which_transformers_builds_no_model_is_one_sentence(
    tiny_qwen: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = Path(shutil.copytree(tiny_qwen, tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    assert "transformers builds no language model from its config.json (" in refused(path, check_weights)
