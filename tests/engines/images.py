"""Prompts with images for a tiny model, and the log-probs of plain transformers forwards."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from dataflow.batch import Batch
from dataflow.data.prompts import Problems, PromptSource
from dataflow.engines.pretrained import add_mean
from dataflow.models.processor import Processor
from dataflow.models.tokenizer import load_chat_tokenizer

R = 6


def picture(red: int, wide: int) -> dict[str, bytes]:
    file = io.BytesIO()
    Image.new("RGB", (wide, 60), (red, 10, 200)).save(file, "PNG")
    return {"bytes": file.getvalue()}


def row(text: str, *images: dict[str, Any]) -> dict[str, Any]:
    facts = {"data_source": "s", "reward_model": {"ground_truth": "1"}, "extra_info": {"index": 0}}
    return {"prompt": [{"role": "user", "content": text}], **facts, **({"images": list(images)} if images else {})}


ROWS = [
    row("<image> What is it?", picture(200, 60)),
    row("Is <image> more than <image> is?", picture(10, 60), picture(90, 120)),
    row("How many?"),
    row("And how few?"),
]


def source(model: Path, rows: list[dict[str, Any]] = ROWS, *, sees: bool = True, **changes: Any) -> PromptSource:
    options = {"max_prompt_length": 64, "truncation": "error", "filter_overlong_prompts": False, "shuffle": False}
    data = SimpleNamespace(**options | changes)
    processor = Processor(str(model)) if sees else None
    problems = Problems(rows, [f"data, row {at + 1}" for at in range(len(rows))], "data")
    return PromptSource(problems, load_chat_tokenizer(str(model)), data, 0, 1, processor=processor)


def by_transformers(model: Path, batch: Batch) -> torch.Tensor:
    """Returns the log-probs of a forward of each row, with positions by transformers, float32 ``[rows, R]``."""
    from transformers import Qwen2VLForConditionalGeneration

    plain = Qwen2VLForConditionalGeneration.from_pretrained(model)
    add_mean(plain)  # a trainer of this process has replaced the forward of its class
    found = torch.zeros(len(batch), R)
    for at in range(len(batch)):
        there = batch["attention_mask"][at].bool()
        ids, shown = batch["input_ids"][at][there][None], batch["multi_modal_inputs"][at].inputs
        places = torch.arange(ids.shape[1]).expand(3, 1, -1)
        if shown:
            places, _shift = plain.model.get_rope_index(
                ids, (ids == plain.config.image_token_id).int(), shown["image_grid_thw"]
            )
        places = torch.cat([torch.arange(ids.shape[1]).expand(1, 1, -1), places])
        with torch.no_grad():
            logits = plain(input_ids=ids, position_ids=places, attention_mask=torch.ones_like(ids), **shown).logits[0]
        each = logits[:-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        count = int(batch["response_mask"][at].sum())
        found[at, :count] = each[-count:]
    return found
