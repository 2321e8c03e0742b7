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

from dataflow.models.problems import generate
from dataflow.models.tiny import Recipe, build_model, build_tokenizer

SHAPES = {
    "0.5b": Recipe(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2),
    "1.5b": Recipe(hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2),
    "tiny": Recipe(hidden=64, intermediate=192, layers=2, heads=4, kv_heads=2),
}
VOCABULARY, PROBLEMS = 151_936, 256
TEMPLATE = 16  # more tokens than the chat template adds


def main(directory: Path, shape: str, tokens: int) -> None:
    """Writes ``model/`` and ``problems.jsonl``, whose prompts have that many tokens or somewhat less."""
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = build_model(SHAPES[shape], tokenizer)
        padded = VOCABULARY if shape != "tiny" else len(tokenizer) + 64
        model.resize_token_embeddings(padded, mean_resizing=False)
    model.to(torch.bfloat16).save_pretrained(directory / "model")
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
