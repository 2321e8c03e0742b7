"""Synthetic traces of any length, for tests and benchmarks of the timeline."""

from __future__ import annotations

import random
from typing import Any

from dataflow.timeline.spans import Mark, Span, Trace

PARTS = 4


def made_up(steps: int, requests: int = 1, seed: int = 0, policy: str = "both") -> Trace:
    """Returns a trace as under the policy ``both``: the next step's rollout runs before this step's updates.

    Args:
        steps: number of steps, each of 17 tasks.
        requests: reward requests in each of a step's four mini-batches.
        seed: of the durations.
        policy: name of the policy in the trace's metadata.
    """
    draw = random.Random(seed)
    resources = {"gpu": 1, "reward": None, "controller": 1, "io": 1}
    meta = {"policy": policy, "split": PARTS, "max_staleness": 1, "order": "arrival", "steps": steps, "seed": seed,
            "status": "finished", "resources": resources,
            "job": {"prompts": PARTS, "responses": requests, "mini_batches": PARTS, "concurrency": 64}}  # fmt: skip
    trace = Trace(meta=meta)
    gpu = _rollout(trace, 1, 0.0, draw)
    for step in range(1, steps + 1):
        asked = gpu + 0.002
        trace.add(Span("reward_request", step, 0, 1, "controller", gpu, asked, {}, f"rollout[{step}]"))
        if step < steps:
            gpu = _rollout(trace, step + 1, gpu, draw)
        end = gpu + draw.uniform(0.6, 0.8)
        facts = {"samples": PARTS * requests, "weights_version": max(0, step - 2)}
        trace.add(Span("old_log_prob", step, 0, 1, "gpu", gpu, end, facts, f"rollout[{step}]"))
        gpu, came = end, asked
        for part in range(PARTS):
            came, gpu = _mini_batch(trace, step, part, requests, asked, came, gpu, draw)
        for stage in ("gather_weights", "sync_weights"):
            trace.add(Span(stage, step, 0, 1, "gpu", gpu, gpu + 0.03, {}, f"actor_update[{step}.{PARTS}]"))
            gpu += 0.03
    return trace


def _rollout(trace: Trace, step: int, at: float, draw: random.Random) -> float:
    end = at + draw.uniform(0.9, 1.4)
    waited = f"sync_weights[{step - 2}]" if step > 2 else ""
    facts = {"samples": 32, "weights_version": max(0, step - 2)}
    trace.add(Span("rollout", step, 0, 1, "gpu", at, end, facts, waited))
    return end


def _mini_batch(
    trace: Trace, step: int, part: int, requests: int, asked: float, came: float, gpu: float, draw: random.Random
) -> tuple[float, float]:
    """Adds the requests, advantages and update of a mini-batch; returns the ends of its rewards and of its update."""
    name = f"[{step}.{part + 1}]"
    last = came
    for sample in range(requests):
        tries = 3 if draw.random() < 0.05 else 1
        end = max(asked + 0.05, came + draw.uniform(0.0, 0.9) * tries)
        last = max(last, end)
        facts: dict[str, Any] = {"part": part, "step": step, "group": part, "sample": sample}
        if tries > 1:
            facts |= {"tries": tries, "queued_s": 0.25, "held_by": "rate"}
        trace.add(Mark("reward", "reward", asked, end, facts))
    trace.add(Span("reward_collect", step, part, PARTS, "reward", came, last, {"samples": requests},
                   f"reward_request[{step}]"))  # fmt: skip
    done = last + 0.004
    trace.add(Span("advantage", step, part, PARTS, "controller", last, done, {}, f"reward_collect{name}"))
    begin = max(done, gpu)
    end = begin + draw.uniform(0.3, 0.5)
    trace.add(Span("actor_update", step, part, PARTS, "gpu", begin, end, {}, f"advantage{name}"))
    return last, end
