"""Metrics of a step's times and tokens under verl's names: ``timing_s/*``, ``timing_per_token_ms/*`` and ``perf/*``.

verl's own functions of these divisions are not called: a run's own process would import verl for them, 8 s of CPU time.
The tests compare the results with them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from dataflow.timeline.agents import reward_causes_of
from dataflow.timeline.causes import pool_waits
from dataflow.timeline.spans import POOLS, Trace, covered

# verl's names for stages with a role; any other stage keeps its own name.
TIMINGS = {"samples": "gen", "trains": "update_actor"}
FIELDS = {"old_log_probs": "old_log_prob", "ref_log_probs": "ref", "advantages": "adv"}
FIELDS |= {"values": "values", "critic": "update_critic"}
"""verl's names for stages, by a field that they write."""
_TAKEN = {*TIMINGS.values(), *FIELDS.values(), "testing", "reward", "step"}
"""What follows ``timing_s/`` in a name that means one thing, whatever the stages are called."""

TIMING = "timing_s/"
TOTAL, RESPONSES = "perf/total_num_tokens", "perf/response_tokens"
_OF_ALL_TOKENS = ("ref", "values", "adv", "update_critic", "update_actor")
"""Stages that verl divides by the tokens of prompts and responses; ``gen`` by those of the responses."""


def step_metrics(trace: Trace, step: int) -> dict[str, float]:
    """Returns the times of a step under verl's names, in seconds; none if the trace has no training task of the step.

    A step's time window runs from the end of the previous step (its last training task) to its own end. The windows
    cover the run without overlap, so ``timing_s/step`` and the waits add up over the steps.

    Returns:
        ``timing_s/<stage>``: time in which the tasks of this step ran that the stage, or the stages of one verl name,
        have, even outside the window;
        ``timing_s/reward``: how long the GPUs waited for rewards in the window, of several agents also for each,
        ``timing_s/reward/<agent>``; ``timing_s/step``: its length;
        ``overlap/exposed_wait_s``, ``overlap/gpu_busy_frac``: all waits and the busy share in the window.
    """
    own = [s for s in trace.spans if s.step == step]
    training = [s for s in own if not s.optional]
    if not training:
        return {}
    start = trace.window[0]
    begin = max((s.end for s in trace.spans if s.step < step and not s.optional), default=start)
    end = max(begin, max(s.end for s in training))
    names = timing_names(trace)
    ran: dict[str, list[tuple[float, float]]] = {}
    for span in own:
        ran.setdefault(names.get(span.stage, span.stage), []).append((span.begin, span.end))
    metrics = {f"timing_s/{name}": covered(spans, -math.inf, math.inf) for name, spans in ran.items()}
    waits = pool_waits(trace, (begin, end))
    waited = sum(waits.values())
    by_agent = {agent: waits.get(cause, 0.0) for cause, agent in reward_causes_of(trace).items()}
    metrics["timing_s/reward"] = sum(by_agent.values())
    if len(by_agent) > 1:
        metrics |= {f"timing_s/reward/{agent}": seconds for agent, seconds in by_agent.items()}
    metrics["timing_s/step"] = took = end - begin
    metrics["overlap/exposed_wait_s"] = waited
    metrics["overlap/gpu_busy_frac"] = 1 - waited / took if took > 0 else 0.0
    return metrics


def timing_names(trace: Trace) -> dict[str, str]:
    """Returns verl's name for each stage that verl times as well; for a validation, the stage that samples.

    A stage that has such a name, or that of a sum, and does something else is ``stage/NAME``.
    """
    placed = trace.placed
    names = {stage: f"stage/{stage}" for stage in placed if stage in _TAKEN or stage.startswith("reward/")}
    names |= {stage: TIMINGS[role] for stage, role in trace.roles.items() if role in TIMINGS}
    names |= {stage: "testing" for stage in trace.with_role("validates") if placed.get(stage) in POOLS}
    return names | {s["name"]: FIELDS[field] for s in trace.declared for field in s["writes"] if field in FIELDS}


def throughput(metrics: Mapping[str, float], gpus: int) -> dict[str, float]:
    """Returns verl's metrics of throughput for a step; none if nothing has counted its tokens or time.

    They are ``perf/throughput``, tokens per second and GPU, ``perf/time_per_step``, and
    ``timing_per_token_ms/<stage>``. ``gpus`` are those of trainer, engine and reward models; on CPUs their processes.
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
