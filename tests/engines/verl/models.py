"""Trained models to test, rows for them, and what plain transformers compute of these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dataflow.batch import Batch
from dataflow.config.algorithm import AlgorithmConfig
from dataflow.config.run import TrainerConfig
from dataflow.config.training import CriticConfig
from dataflow.engines.verl.loss import loss_of
from dataflow.engines.verl.trainer import VerlCritic, VerlTrainer

P, R, VOCABULARY = 9, 7, 259
TRAINED: dict[str, Any] = {"micro_batch_size": 64, "lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
ALGORITHM: dict[str, Any] = {"clip_ratio_high": 0.3, "kl_loss_coef": 0.1}

Make = Callable[..., VerlTrainer]


def build(model: Path | str, **options: Any) -> VerlTrainer:
    """Builds a trainer; options go to the section, or the argument, that has that name."""
    trainer = TRAINED | {k: options.pop(k) for k in list(options) if k in TrainerConfig.model_fields}
    algorithm = ALGORITHM | {k: options.pop(k) for k in list(options) if k in AlgorithmConfig.model_fields}
    sections = TrainerConfig(**trainer), AlgorithmConfig(**algorithm)
    return VerlTrainer(str(model), *sections, total_steps=10, response_length=R, **options)


class Fresh:
    """A trainer that is built once: each call gives it its first weights, and another algorithm."""

    def __init__(self, model: Path, state: Path) -> None:
        self.trainer, self._state = build(model, reference=True), state
        save(self.trainer, state)

    def __call__(self, micro_batch_size: int = 64, **options: Any) -> VerlTrainer:
        trainer, algorithm = self.trainer, AlgorithmConfig(**ALGORITHM | options)
        trainer.load(str(self._state))
        trainer.algorithm, trainer.loss_agg_mode = algorithm, algorithm.loss_agg_mode
        trainer.division = replace(trainer.division, size=micro_batch_size)
        section = TrainerConfig(**TRAINED | {"micro_batch_size": micro_batch_size})
        trainer.worker.set_loss_fn(loss_of(section, algorithm, R))
        return trainer


def build_critic(model: Path | str, **options: Any) -> VerlCritic:
    """Builds a critic, likewise."""
    critic = TRAINED | {k: options.pop(k) for k in list(options) if k in CriticConfig.model_fields}
    return VerlCritic(str(model), CriticConfig(**critic), total_steps=10, **options)


def responses(rows: int, seed: int = 0, group: int = 2) -> Batch:
    """Random rows with prompts of 2 to P tokens, left-padded, and answers of 1 to R tokens, right-padded."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, P + R), generator=draw)
    prompt = torch.randint(2, P + 1, (rows, 1), generator=draw)
    answer = torch.randint(1, R + 1, (rows, 1), generator=draw)
    prompt[0], answer[0] = P, R
    at = torch.arange(P + R)
    mask = ((at >= P - prompt) & (at < P + answer)).long()
    ids = ids * mask
    return Batch(
        [row // group for row in range(rows)],
        {
            "prompts": ids[:, :P],
            "responses": ids[:, P:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(dim=1) - 1).clamp(min=0),
            "response_mask": mask[:, P:],
            "raw_prompt": [f"row {row}" for row in range(rows)],
        },
        {"weights_version": 0},
    )


def training_batch(log_probs: torch.Tensor, batch: Batch, seed: int = 0) -> Batch:
    """Adds advantages and old log-probs far enough from the present ones that some ratios are clipped."""
    draw = torch.Generator().manual_seed(seed + 1000)
    mask = batch["response_mask"]
    off = 0.3 * torch.randn(mask.shape, generator=draw) * mask
    advantages = torch.randn((len(batch), 1), generator=draw) * mask
    return batch.merge(batch.like(old_log_probs=log_probs + off, advantages=advantages))


def scored(trainer: VerlTrainer, batch: Batch, seed: int = 0) -> Batch:
    """Returns the batch to train on, by the trainer's own log-probs."""
    return training_batch(trainer.old_log_probs(batch)["old_log_probs"], batch, seed)


def with_returns(batch: Batch, values: torch.Tensor, seed: int = 0) -> Batch:
    """Adds values far enough from the present ones that some predictions are clipped, and random returns."""
    draw = torch.Generator().manual_seed(seed + 1000)
    mask = batch["response_mask"]
    off, gain = (torch.randn(mask.shape, generator=draw) * mask for _ in range(2))
    return batch.merge(batch.like(values=values + 0.1 * off, returns=values + gain))


def save(model: Any, directory: Path) -> None:
    async def work() -> None:
        assert await model.snapshot(wait=False)
        await model.write(str(directory))

    asyncio.run(work())


def load(model: Path | str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa")


def plain_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Outputs at the tokens before those of the responses, ``[rows, R, ...]``, by one padded forward."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return model(**inputs, use_cache=False).logits[:, P - 1 : -1]  # type: ignore[no-any-return]


def plain_log_probs(model: Any, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens and entropies, ``[rows, R]``."""
    every = torch.log_softmax(plain_logits(model, batch) / temperature, dim=-1)
    mask = batch["response_mask"]
    chosen = every.gather(-1, batch["responses"].unsqueeze(-1)).squeeze(-1)
    return chosen * mask, -(every.exp() * every).sum(-1) * mask


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)
