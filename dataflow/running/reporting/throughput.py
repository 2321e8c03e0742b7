"""Metrics of a step's tokens and times under verl's names: ``perf/*`` and ``timing_per_token_ms/*``.

verl's own functions of these divisions are not called: a run's own process would import verl for them, 8 s of CPU time.
The tests compare the results with them.
"""

from __future__ import annotations

from collections.abc import Mapping

TIMING = "timing_s/"
TOTAL, RESPONSES = "perf/total_num_tokens", "perf/response_tokens"
_OF_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")
"""Stages that verl divides by the tokens of prompts and responses; ``gen`` by those of the responses."""


def throughput(metrics: Mapping[str, float], gpus: int) -> dict[str, float]:
    """Returns verl's metrics of throughput for a step.

    Args:
        metrics: of the step: ``timing_s/*``, ``perf/total_num_tokens`` and ``perf/response_tokens``.
        gpus: of trainer, engine and reward models; on CPUs their processes.

    Returns:
        ``perf/throughput``, tokens per second and GPU, ``perf/time_per_step``, and ``timing_per_token_ms/<stage>``.
        Empty for a step whose tokens or time nothing has counted.
    """
    total, responses = metrics.get(TOTAL), metrics.get(RESPONSES)
    seconds = metrics.get(f"{TIMING}step", 0.0)
    if total is None or responses is None or seconds <= 0:
        return {}
    tokens = {"gen": responses, **dict.fromkeys(_OF_ALL_TOKENS, total)}
    per_token = {
        f"timing_per_token_ms/{name}": metrics[f"{TIMING}{name}"] * 1000 / count if count else 0.0
        for name, count in tokens.items()
        if f"{TIMING}{name}" in metrics
    }
    return {**per_token, "perf/time_per_step": seconds, "perf/throughput": total / (seconds * gpus)}
