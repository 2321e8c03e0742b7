"""Tiny random models on disk, prompts for them, and the results of plain transformers forwards for both."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dataflow.batch import Batch

VOCAB, EOS, PAD = 61, 1, 0
ENDS = [EOS, *range(5, VOCAB, 6)]  # many tokens end a response, so that samples end at different times


def save_model(path: Path, seed: int, tie: bool = True, ends: Sequence[int] = ENDS, **shape: Any) -> str:
    """Writes a Qwen2 whose heads are 32 wide, the least that vLLM's attention on CPU takes, or of another shape."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{i}": i for i in range(2, VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    eos = "<eos>" if ends else None
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=eos).save_pretrained(path)
    wanted = {
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 96,
        "initializer_range": 0.25,  # lively enough that different weights say different things
    }
    config = Qwen2Config(
        **{**wanted, **shape},
        vocab_size=VOCAB,
        num_hidden_layers=2,
        max_position_embeddings=128,
        tie_word_embeddings=tie,
        bos_token_id=None,
        eos_token_id=EOS if ends else None,
        pad_token_id=PAD,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = list(ends) or None
    model.save_pretrained(path)
    return str(path)


def load(path: str) -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval().requires_grad_(False)


def prompts(lengths: Sequence[int], first: int = 0) -> Batch:
    """Returns random prompts of these lengths; ``first`` is the first one's group, and says what is in them."""
    ids = [np.random.default_rng(first + i).integers(2, VOCAB, size=size).tolist() for i, size in enumerate(lengths)]
    return Batch(list(range(first, first + len(lengths))), {"prompt_ids": ids})


def greedy(model: Qwen2ForCausalLM, prompt: Sequence[int], limit: int) -> list[int]:
    """Returns the likeliest tokens, up to the first that ends a response: a forward of all of it for each."""
    ids = list(prompt)
    while len(ids) < len(prompt) + limit:
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] in ENDS:
            break
    return ids[len(prompt) :]


def log_probs(
    model: Qwen2ForCausalLM,
    prompt: Sequence[int],
    tokens: Sequence[int],
    temperature: float = 1.0,
) -> torch.Tensor:
    """Returns the log-prob of each token as a trainer computes it, from one forward, ``[len(tokens)]``."""
    ids = torch.tensor([[*prompt, *tokens]])
    logits = model(ids).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
