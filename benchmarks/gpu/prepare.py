"""Writes a model of the shape of a Qwen2.5 with random weights, and problems for it.

    python benchmarks/gpu/prepare.py DIRECTORY 0.5b|1.5b|tiny TOKENS

Random weights teach nothing, but take the time and the memory of trained ones. The vocabulary is padded to the real
one's size; the tokenizer is the tiny model's.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from dataflow.models.problems import generate
from dataflow.models.tiny import build_tokenizer

SHAPES = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4},
}
VOCABULARY, PROBLEMS = 151_936, 256
TEMPLATE = 16  # more tokens than the chat template adds


def main(directory: Path, shape: str, tokens: int) -> None:
    """Writes ``model/`` and ``problems.jsonl``, whose prompts have that many tokens or somewhat less."""
    tokenizer = build_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(
        vocab_size=VOCABULARY if shape != "tiny" else len(tokenizer) + 64,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        **SHAPES[shape],
        **ends,
    )
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(directory / "model")
    tokenizer.save_pretrained(directory / "model")
    stories, _held_out = generate(2048, 1, 0)
    rows = []
    drawn = random.Random(0)
    for _ in range(PROBLEMS):
        told: list[str] = []
        last = drawn.choice(stories)
        while len(tokenizer(" ".join([*told, last["question"]]))["input_ids"]) <= tokens - TEMPLATE:
            told.append(last["question"])
            last = drawn.choice(stories)
        rows.append({"question": " ".join(told), "answer": last["answer"]})
    (directory / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
