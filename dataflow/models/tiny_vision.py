"""A tiny model with random weights that takes images: Qwen2-VL with two layers, to try a pipeline on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

from dataflow.models.tiny import END, PAD, START, build_tokenizer

_IMAGE, _VIDEO, _BEGIN, _END = "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_vision(path: Path, seed: int = 0) -> Path:
    """Writes a Qwen2-VL with random weights, its tokenizer and its processor, in a second.

    Makes the directory, and returns it.
    """
    import torch
    from transformers import GenerationConfig, Qwen2VLConfig, Qwen2VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.utils.logging import disable_progress_bar

    tokenizer = build_tokenizer()
    tokenizer.add_tokens([_IMAGE, _VIDEO, _BEGIN, _END], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    ids = {name: tokenizer.convert_tokens_to_ids(name) for name in (_IMAGE, _VIDEO, _BEGIN, _END, PAD, START, END)}
    ends = {"eos_token_id": ids[END], "pad_token_id": ids[PAD]}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,  # 32 wide, the least that vLLM's attention on CPU takes
            "num_key_value_heads": 1,
            "intermediate_size": 128,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            # The 16 frequencies of a head of 32 numbers, for time, height and width.
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            **ends,
        },
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
        image_token_id=ids[_IMAGE],
        video_token_id=ids[_VIDEO],
        vision_start_token_id=ids[_BEGIN],
        vision_end_token_id=ids[_END],
        tie_word_embeddings=True,
        **ends,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ends)
    disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    # A patch has 14 x 14 pixels, and 2 x 2 of them become one token; larger images than of 16 are made smaller.
    Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=16 * 28 * 28).save_pretrained(path)
    (path / "processor_config.json").write_text(json.dumps({"processor_class": "Qwen2VLProcessor"}), encoding="utf-8")
    return path
