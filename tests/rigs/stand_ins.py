"""Stand-ins for what recipes need and a laptop lacks: the directories of large models, GPUs, vLLM for them.

A model has the real one's config.json and weights of the real names, shapes and type, in a sparse file of zeros that
takes no disk; its tokenizer knows bytes. The GPUs are what CUDA_VISIBLE_DEVICES and an ``nvidia-smi`` on PATH say.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

QWEN_05B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
"""config.json of Qwen/Qwen2.5-0.5B-Instruct, without what does not matter here."""
QWEN_7B = QWEN_05B | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
"""That of Qwen/Qwen2.5-7B-Instruct."""
PARAMETERS = {"0.5B": 494_032_768, "7B": 7_615_616_512}
"""As the hub counts them."""
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields name and shape of each weight of a Qwen2."""
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    cached = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}."
        for name, out in (("q", hidden), ("k", cached), ("v", cached)):
            yield f"{of}self_attn.{name}_proj.weight", (out, hidden)
            yield f"{of}self_attn.{name}_proj.bias", (out,)
        yield f"{of}self_attn.o_proj.weight", (hidden, hidden)
        yield f"{of}mlp.gate_proj.weight", (wide, hidden)
        yield f"{of}mlp.up_proj.weight", (wide, hidden)
        yield f"{of}mlp.down_proj.weight", (hidden, wide)
        yield f"{of}input_layernorm.weight", (hidden,)
        yield f"{of}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def write_model(path: Path, config: Mapping[str, Any], weights: bool = True) -> Path:
    """Writes the directory of a model; returns its path.

    Args:
        path: to make.
        config: its config.json.
        weights: whether to write them, too.
    """
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    _write_tokenizer(path)
    if weights:
        header: dict[str, Any] = {}
        end = 0
        for name, shape in shapes(config):
            begin, numbers = end, 1
            for side in shape:
                numbers *= side
            end = begin + 2 * numbers
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (path / "model.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    return path


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(path / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[2], "pad_token": special[0]}
    (path / "tokenizer_config.json").write_text(json.dumps({**names, "chat_template": _TEMPLATE}))


def show_gpus(patch: pytest.MonkeyPatch, place: Path, number: int, gib: int = 80, used: int = 0) -> None:
    """Makes this machine look as if it had GPUs of that much memory, and vLLM for them."""
    place.mkdir(exist_ok=True)
    rows = "\n".join(f"{at}, GPU-{at:08d}, NVIDIA H100 80GB HBM3, {gib * 1024}, {used * 1024}" for at in range(number))
    program = place / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'ROWS'\n{rows}\nROWS\n")
    program.chmod(0o755)
    patch.setenv("PATH", str(place), prepend=":")
    patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))
    patch.setattr("dataflow.engines.choice.vllm_device", lambda: "cuda")
