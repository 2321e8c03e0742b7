"""Tiny reward models on disk, and their scores by transformers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 96, "max_position_embeddings": 1024}
"""Heads are 32 wide, the least that vLLM's attention on CPU takes."""


def save_reward_model(tokenizer: Path, path: Path, kind: str = "classify", seed: int = 7) -> Path:
    """Writes a random Qwen2 with a head of one score, or a chat model.

    Args:
        tokenizer: directory of a model, whose tokenizer and configuration are taken.
        path: where to write it.
        kind: ``classify`` or ``chat``.
        seed: of its weights.
    """
    import torch
    from transformers import AutoConfig, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    made: Any = Qwen2ForSequenceClassification if kind == "classify" else Qwen2ForCausalLM
    labels = {"num_labels": 1} if kind == "classify" else {}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made(AutoConfig.from_pretrained(tokenizer, **labels, **SHAPE)).save_pretrained(path)
    for file in tokenizer.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, path)
    return path


def scores(path: Path, chats: Sequence[Sequence[dict[str, str]]]) -> list[float]:
    """Returns the scores of conversations by transformers itself, one at a time."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    found = []
    for chat in chats:
        ids = tokenizer.apply_chat_template(list(chat), tokenize=True, return_dict=True)["input_ids"]
        with torch.no_grad():
            found.append(float(model(torch.tensor([ids])).logits[0, 0]))
    return found
