"""What a verl log shows of the settings that a plan needs: its own configuration, or guesses from its tokens."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from dataflow.errors import ConfigError
from dataflow.planning.config import PlanConfig
from dataflow.planning.sources.logs.settings import read_settings
from dataflow.planning.sources.scalars import Scalars

_RESPONSES = (8, 5, 4, 16, 6, 10, 12, 7, 3, 2, 9, 15, 14, 32, 1)
"""Responses to a prompt, in the order in which they are tried: what runs of GRPO often have."""
_NEAR = 0.03
"""Share by which a product may be off a number of samples that is estimated."""
_MOST = 1e15
"""Tokens of a step; a larger count is none."""
_STEPS, _CORRELATED = 10, 0.98
"""Steps, and correlation of tokens with the length of responses, from which the number of samples is estimated."""


def known_settings(path: Path, config: PlanConfig, assumed: list[str]) -> PlanConfig:
    """Returns the configuration with the settings that the log itself holds, where the user gave none.

    Args:
        path: the log.
        config: what the user gave.
        assumed: gets a sentence on what was found.

    Raises:
        ConfigError: the user gave another size of a step than the times of the log are of.
    """
    found = read_settings(path)
    prompts: Any = found.get("data.train_batch_size")
    small: Any = found.get("actor_rollout_ref.actor.ppo_mini_batch_size")
    values: dict[str, Any] = {
        "prompts": prompts,
        "responses": found.get("actor_rollout_ref.rollout.n"),
        "mini_batches": prompts // small if _is_count(prompts) and _is_count(small) and prompts % small == 0 else None,
    }
    for key in ("prompts", "responses"):
        given = getattr(config, key)
        if given not in (None, values[key]) and _is_count(values[key]):
            raise ConfigError(f"{key}={given}: the log's configuration of verl has {values[key]}; leave it out.")
    new = {key: value for key, value in values.items() if getattr(config, key) is None and _is_count(value)}
    if new:
        listed = " ".join(f"{key}={value}" for key, value in new.items())
        assumed.append(f"{listed}: from the configuration of verl that the log holds.")
    balance = found.get("trainer.balance_batch")
    if config.balance_batch is None and isinstance(balance, bool):
        new["balance_batch"] = balance
    return config.model_copy(update=new)


def examples(log: Scalars, config: PlanConfig) -> tuple[dict[str, object], str]:
    """Returns values of the settings to offer to the user, and what the log says of them; "" if it says nothing."""
    offered: dict[str, object] = {"prompts": 1024, "responses": 5, "mini_batches": 4, "log.concurrency": 256}
    samples, about = _samples(log)
    if not samples:
        return offered, ""
    prompts, responses = _factors(samples, bool(about), config)
    offered |= {"prompts": prompts, "responses": responses}
    if config.mini_batches is None:
        offered["mini_batches"] = next(n for n in (4, 2, 1) if prompts % n == 0)
    if config.prompts is not None and config.responses is not None:
        return offered, ""
    basis = f" (the log's tokens are those of {about}{samples:.0f} samples a step: prompts x responses)"
    return offered, basis


def _samples(log: Scalars) -> tuple[float, str]:
    """Returns the samples of a step by the log's counts of tokens, and "about " if estimated; 0 if it has none."""
    tokens, length = log.series("perf/total_num_tokens"), log.series("response_length/mean")
    prompt = log.series("prompt_length/mean")
    steps = sorted(step for step in set(tokens).intersection(length) if max(tokens[step], length[step]) < _MOST)
    if each := [tokens[step] / max(1.0, prompt[step] + length[step]) for step in steps if step in prompt]:
        return round(statistics.median(each)), ""
    # The tokens of a step are samples x (prompt + response), and prompts are equally long on average.
    x, y = [length[step] for step in steps], [tokens[step] for step in steps]
    if len(steps) < _STEPS or min(x) == max(x) or min(y) == max(y) or statistics.correlation(x, y) < _CORRELATED:
        return 0.0, ""
    return round(statistics.linear_regression(x, y).slope), "about "


def _factors(samples: float, estimated: bool, config: PlanConfig) -> tuple[int, int]:
    """Returns prompts and responses whose product is near a number of samples."""
    if config.prompts is not None:
        return config.prompts, max(1, round(samples / config.prompts))
    if config.responses is not None:
        return max(1, round(samples / config.responses)), config.responses
    off: list[tuple[float, int, int]] = []
    for responses in _RESPONSES:
        prompts = 2 ** round(math.log2(max(1.0, samples / responses)))
        if (away := abs(prompts * responses / samples - 1)) <= (_NEAR if estimated else 0):
            off.append((away, prompts, responses))
    if not off:
        exact = 1 if estimated else next(r for r in _RESPONSES if samples % r == 0)
        return max(1, round(samples / exact)), exact
    best = min(away for away, *_ in off)
    return next((prompts, responses) for away, prompts, responses in off if away == best)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
