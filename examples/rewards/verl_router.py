"""A function written for verl's reward loop, unchanged: it calls a reward model behind verl's router."""

from __future__ import annotations

from typing import Any

import aiohttp

SCORES = {"yes": 1.0, "no": 0.0}


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any],
    reward_router_address: str,
    reward_model_tokenizer: Any,
) -> dict[str, Any]:
    """Returns the reward model's verdict; raises KeyError, and so fails, if it is neither yes nor no."""
    ask = f"{solution_str}\n\nIs this answer equal to {ground_truth}? Reply with yes or no."
    chat = [{"role": "user", "content": ask}]
    prompt = reward_model_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    async with aiohttp.request("POST", f"http://{reward_router_address}/v1/completions", json=body) as reply:
        reply.raise_for_status()
        reply_text = (await reply.json())["choices"][0]["text"]
    return {"score": SCORES[reply_text.strip().lower()], "acc": SCORES[reply_text.strip().lower()]}
