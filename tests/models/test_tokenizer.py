"""Tokenizers: loaded with the template's options, hashed, and compared where two models must count the same tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dataflow.errors import ModelError
from dataflow.models.tokenizer import check_same_tokens, load_chat_tokenizer, prompt_ids, tokenizer_sha256
from tests.rigs.thinking import THOUGHT, thinking_model

pytestmark = pytest.mark.heavy
CHAT = [{"role": "user", "content": "What is 3 + 4?"}]


def test_options_of_the_template_are_those_of_all_that_is_rendered(tiny_qwen: Path, tmp_path: Path) -> None:
    model = str(thinking_model(tiny_qwen, tmp_path / "model"))

    def rendered(**options: object) -> str:
        tokenizer = load_chat_tokenizer(model, options)
        return str(tokenizer.decode(prompt_ids(tokenizer, CHAT)))

    assert rendered(enable_thinking=False).endswith(THOUGHT)
    assert not rendered().endswith(THOUGHT)


def test_a_tokenizer_that_cannot_be_used_is_one_sentence(tiny_qwen: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(tiny_qwen, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="has no chat template"):
        load_chat_tokenizer(str(bare))
    (bare / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"model\.path: no tokenizer can be loaded") as caught:
        load_chat_tokenizer(str(bare))
    assert "\n" not in str(caught.value)


def test_the_tokenizers_files_have_a_hash(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = tokenizer_sha256(str(tmp_path))
    (tmp_path / "README.md").write_text("read me")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert tokenizer_sha256(str(tmp_path)) == before
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_sha256(str(tmp_path)) != before


def test_two_models_count_the_same_tokens_or_are_refused_with_one_that_differs(tiny_qwen: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_qwen, tmp_path / "other"))
    check_same_tokens(str(tiny_qwen), str(other), "teacher.path")
    tokenizer = load_chat_tokenizer(str(other))
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match=r"teacher\.path=.*differ in 1 tokens, such as '<think>'\); take a model"):
        check_same_tokens(str(tiny_qwen), str(other), "teacher.path")
