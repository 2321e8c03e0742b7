"""A model's directory: if something is missing, damaged or of another kind, one sentence says so at once."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from dataflow.errors import ModelError
from dataflow.models.directory import INDEX, WEIGHTS, check_classifier, check_files, check_weights, room_of
from dataflow.models.tiny import check_model

CONFIG = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 8, "max_position_embeddings": 32}
NAMES = ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Files that look like a model's: enough for a check of their headers."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text("{}")
    save_file({name: np.zeros((8, 4), np.float32) for name in NAMES}, path / WEIGHTS)
    return path


def refused(path: Path) -> str:
    with pytest.raises(ModelError) as caught:
        check_model(path)
    said = str(caught.value)
    assert "\n" not in said
    assert str(path) in said
    return said


def test_files_that_are_whole_pass(model: Path) -> None:
    check_files(model)
    assert check_model(model) == model
    assert (room_of(model).positions, room_of(model).vocabulary) == (32, 8)


def header(length: int | None = None, **tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text


ONE = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "no length": lambda whole: whole[:5],
    "cut in the header": lambda whole: whole[:40],
    "cut in the data": lambda whole: whole[:-1],
    "longer than it says": lambda whole: whole + b"\0",
    "header of zeros": lambda whole: whole[:8] + bytes(len(whole) - 8),
    "length too long": lambda whole: header(10**9, a=ONE) + bytes(16),
    "length of 2**64": lambda whole: b"\xff" * 8 + whole[8:],
    "header is a list": lambda whole: struct.pack("<Q", 2) + b"[]",
    "header is text": lambda whole: struct.pack("<Q", 9) + b"weights!!",
    "unknown type": lambda whole: header(a={**ONE, "dtype": "F31"}) + bytes(16),
    "shape and offsets differ": lambda whole: header(a={**ONE, "shape": [2, 3]}) + bytes(16),
    "offsets overlap": lambda whole: header(a=ONE, b={**ONE, "data_offsets": [8, 24]}) + bytes(24),
    "offsets leave a hole": lambda whole: header(a=ONE, b={**ONE, "data_offsets": [20, 36]}) + bytes(36),
    "negative shape": lambda whole: header(a={**ONE, "shape": [-2, -2]}) + bytes(16),
    "a Git LFS pointer": lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
    "a pickle by that name": lambda whole: b"\x80\x04}\x94.",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_damaged_file_of_weights_is_named(model: Path, damage: str, sharded: bool) -> None:
    file = model / WEIGHTS
    if sharded:
        file = file.rename(model / "model-00001-of-00001.safetensors")
        (model / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(NAMES, file.name)}))
        check_files(model)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert f"weights {file} cannot be read" in refused(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "b.safetensors").unlink(), "shard b.safetensors is missing"),
        (lambda path: (path / INDEX).write_text("{"), f"{INDEX} cannot be read"),
        (lambda path: (path / INDEX).write_text("{}"), "has no weight_map"),
        (lambda path: (path / INDEX).write_text('{"weight_map": ["a.safetensors"]}'), "has no weight_map"),
        (lambda path: (path / INDEX).write_text('{"weight_map": {}}'), "holds no weights"),
        (lambda path: (path / INDEX).write_text('{"weight_map": {"a": "../x"}}'), "is not a file in that directory"),
        (lambda path: shutil.copy(path / "a.safetensors", path / "b.safetensors"), "is not in b.safetensors"),
    ],
)
def test_shards_are_all_there_and_hold_what_the_index_says(
    model: Path, change: Callable[[Path], Any], message: str
) -> None:
    whole = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    of = dict(zip(NAMES, ("a.safetensors", "a.safetensors", "b.safetensors"), strict=True))
    for shard in ("a.safetensors", "b.safetensors"):
        save_file({name: whole[name] for name in NAMES if of[name] == shard}, model / shard)
    (model / INDEX).write_text(json.dumps({"weight_map": of}))
    check_files(model)
    change(model)
    assert message in refused(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused(model: Path, name: str) -> None:
    (model / WEIGHTS).rename(model / name)
    assert f"has its weights in {name}, a pickle" in refused(model)


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.bool_])
def test_weights_that_are_no_floating_point_numbers_are_refused(model: Path, kind: type) -> None:
    save_file({"model.norm.weight": np.zeros(4, kind)}, model / WEIGHTS)
    assert "is of type" in refused(model)


def test_no_weights_at_all(model: Path) -> None:
    save_file({}, model / WEIGHTS)
    assert "holds no weights" in refused(model)
    (model / WEIGHTS).unlink()
    assert f"has no weights ({WEIGHTS})" in refused(model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "bert", "architectures": ["BertModel"]},
            "is a BertModel, which is not a causal language model",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "not a causal language model; BertLMHeadModel is",
        ),
        ({"model_type": "bert", "architectures": ["BertLMHeadModel"], "is_decoder": False}, "is_decoder=false"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "not a causal language model"),
        (
            {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
            "not a causal language model",
        ),
        (
            {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]},
            "which is not a causal language model; of those that take images, qwen2_vl or qwen2_5_vl is needed",
        ),
        ({"model_type": "clip", "architectures": ["CLIPModel"]}, "not a causal language model"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "Qwen2ForCausalLM is needed"),
        ({"architectures": ["Qwen2ForTokenClassification"]}, "Qwen2ForCausalLM is needed"),
        ({"architectures": ["Qwen2Model"]}, "Qwen2ForCausalLM is needed"),
        ({"architectures": None}, "names no architectures"),
        ({"architectures": []}, "names no architectures"),
        ({"architectures": "Qwen2ForCausalLM"}, "names no architectures"),
        ({"model_type": "qwen9"}, "transformers has no model_type 'qwen9'; did you mean 'qwen"),
        ({"model_type": "nothing_of_the_kind"}, "transformers has no model_type 'nothing_of_the_kind'; install"),
        ({"model_type": None}, "has no model_type"),
        ({"model_type": ["qwen2"]}, "has no model_type"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "has Python code of its own"),
        ({"quantization_config": {"quant_method": "gptq"}}, "is quantized"),
    ],
)
def test_another_kind_of_model_is_refused(model: Path, change: dict[str, Any], message: str) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert message in refused(model)


@pytest.mark.parametrize(
    ("kind", "architecture", "passes"),
    [
        ("classify", "Qwen2ForSequenceClassification", True),
        ("classify", "Qwen2ForTokenClassification", False),
        ("classify", "Qwen2ForCausalLM", False),
        ("pooling", "Qwen2ForTokenClassification", True),
        ("pooling", "Qwen2ForRewardModel", True),
        ("pooling", None, False),
    ],
)
def test_a_reward_model_has_a_head(model: Path, kind: str, architecture: str | None, passes: bool) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, "architectures": architecture and [architecture]}))
    if passes:
        check_classifier(model, kind)
        (model / WEIGHTS).unlink()
    said = "has no weights" if passes else "has no classification head: it is a " + (architecture or "model without")
    with pytest.raises(ModelError, match=said):
        check_classifier(model, kind)


def test_a_reward_model_must_be_there(model: Path) -> None:
    with pytest.raises(ModelError, match="nowhere does not exist"):
        check_classifier(model / "nowhere", "classify")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe{\0}\0", b'{"a": "\xff"}', b"\xef\xbb\xbf{}", b"[" * 100_000, b'{"a": 1}\0'],
    ids=["empty", "cut", "list", "utf-16", "bytes", "mark", "deep", "nul"],
)
def test_json_that_cannot_be_read_is_named(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    assert name in refused(model)


def test_the_check_imports_nothing_heavy(model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dataflow.models.tiny import check_model\n"
        "check_model(sys.argv[1]); print(sorted({'torch', 'transformers', 'ray', 'vllm', 'verl'} & sys.modules.keys()))"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, str(model)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert made.stdout == "[]\n", made.stderr


Q, G = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.gate_proj.weight"
SHAPES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "shape": (
        lambda w: {**w, Q: np.zeros((3, 3), np.float32)},
        f"weight '{Q}' has the shape [3, 3] in its file and [32",
    ),
    "transposed": (lambda w: {**w, G: np.ascontiguousarray(w[G].T)}, f"weight '{G}' has the shape"),
    "missing": (lambda w: {name: of for name, of in w.items() if name != Q}, f"weight '{Q}' is in none of its files"),
    "all others": (lambda w: {"foo": w[Q]}, "is in none of its files (and"),
}


@pytest.mark.heavy
@pytest.mark.parametrize("case", SHAPES)
def test_weights_have_the_names_and_shapes_that_the_architecture_has(
    tiny_qwen: Path, tmp_path: Path, case: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_qwen, path)
    check_weights(path)
    change, message = SHAPES[case]
    save_file(change(load_file(path / WEIGHTS)), path / WEIGHTS)
    check_files(path)
    with pytest.raises(ModelError) as caught:
        check_weights(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.heavy
@pytest.mark.parametrize("change", [{"hidden_size": "many"}, {"num_attention_heads": 0}, {"num_hidden_layers": -1}])
def test_a_configuration_that_builds_no_model_is_one_sentence(
    tiny_qwen: Path, tmp_path: Path, change: dict[str, Any]
) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_qwen, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelError) as caught:
        check_weights(path)
    assert "\n" not in str(caught.value)
