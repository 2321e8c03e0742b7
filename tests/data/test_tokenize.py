"""Tokenizers: two models that must count the same tokens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dataflow.data.tokenize import check_same_tokens
from dataflow.errors import ModelError

pytestmark = pytest.mark.heavy


def test_a_model_counts_the_same_tokens_as_its_copy(tiny_qwen: Path, tmp_path: Path) -> None:
    check_same_tokens(str(tiny_qwen), shutil.copytree(tiny_qwen, tmp_path / "copy"), "teacher.path")


@pytest.mark.parametrize("key", ["teacher.path", "critic.path"])
def test_a_model_with_other_tokens_is_refused_with_one_of_them(key: str, tiny_qwen: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    other = shutil.copytree(tiny_qwen, tmp_path / "other")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ModelError, match=rf"{key}=.*differ in 1 tokens, such as '<think>'\); take a model"):
        check_same_tokens(str(tiny_qwen), str(other), key)


def test_a_teacher_without_a_tokenizer_is_named(tiny_qwen: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"teacher\.path"):
        check_same_tokens(str(tiny_qwen), str(tmp_path), "teacher.path")
