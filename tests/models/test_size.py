"""The sizes of a model from its config.json: those of the published models, and of its weights where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.errors import NotChecked
from dataflow.models.size import count, size_of
from tests.rigs.stand_ins import PARAMETERS, QWEN_05B, QWEN_7B, write_model

pytestmark = pytest.mark.heavy
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
}  # fmt: skip
QWEN3_4B = {
    "model_type": "qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3_30B = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "head_dim": 128, "num_attention_heads": 32,
    "num_key_value_heads": 4, "vocab_size": 151936, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (QWEN_05B, PARAMETERS["0.5B"]),
        (QWEN_7B, PARAMETERS["7B"]),
        (LLAMA_8B, 8_030_261_248),
        (QWEN3_4B, 4_022_468_096),
        (QWEN3_30B, 30_532_122_624),
    ],
)
def test_parameters_are_those_of_the_published_models(
    config: dict[str, object], parameters: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert size_of(tmp_path).parameters == parameters


def test_they_are_those_of_the_files(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", QWEN_05B)
    assert count(path) == size_of(path).parameters == PARAMETERS["0.5B"]
    assert size_of(path).cached == 2 * 24 * 2 * 64


def test_of_other_models_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(NotChecked, match=r"the memory of model .* cannot be estimated"):
        size_of(tmp_path)
