"""Metrics of a step's tokens and times, computed by verl: ``perf/*`` and ``timing_per_token_ms/*``."""

from __future__ import annotations

from collections.abc import Mapping

TIMING = "timing_s/"


def throughput(metrics: Mapping[str, float], gpus: int) -> dict[str, float]:
    """Returns verl's metrics of throughput for a step.

    Args:
        metrics: of the step: ``timing_s/*``, ``perf/total_num_tokens`` and ``perf/response_tokens``.
        gpus: of trainer, engine and reward models; on CPUs their processes.

    Returns:
        ``perf/throughput``, tokens per second and GPU, ``perf/total_num_tokens``, ``perf/time_per_step``, and
        ``timing_per_token_ms/<stage>``. Empty for a step whose tokens or time nothing has counted.
    """
    total, responses = metrics.get("perf/total_num_tokens"), metrics.get("perf/response_tokens")
    if total is None or responses is None or metrics.get(f"{TIMING}step", 0.0) <= 0:
        return {}
    import torch
    from verl import DataProto
    from verl.trainer.ppo.metric_utils import compute_throughout_metrics, compute_timing_metrics

    seconds = {name.removeprefix(TIMING): of for name, of in metrics.items() if name.startswith(TIMING)}
    # verl adds up the tokens of the samples; here they are one.
    lengths = {"prompt_length": torch.tensor([total - responses]), "response_length": torch.tensor([responses])}
    batch = DataProto.from_dict(tensors=lengths, meta_info={"global_token_num": [total]})
    per_token = compute_timing_metrics(batch, seconds)
    found = {name: of for name, of in per_token.items() if not name.startswith(TIMING)}
    return {**found, **compute_throughout_metrics(batch, seconds, gpus)}
