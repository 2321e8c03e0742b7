"""A simulated run, with the trace that a real one would have written."""

from __future__ import annotations

import json

from dataflow.distribution import Distribution, parse_distribution
from dataflow.planning.simulation import simulate
from dataflow.planning.workload import Modelled, Rewards, Validation, Workload, grpo
from dataflow.policy import SchedulingPolicy, preset
from dataflow.timeline.spans import Mark, Trace

SECONDS = {"rollout": 3.0, "old_log_prob": 1.0, "actor_update": 2.0, "sync_weights": 0.25, "val_rollout": 1.0}


def job(steps: int = 8, dispatch_s: float = 0.01) -> Workload:
    validation = Validation(4, samples=6)
    return Workload(
        source="costs",
        pipeline=grpo(False, validation),
        steps=steps,
        prompts=8,
        responses=4,
        mini_batches=4,
        times={name: Modelled(Distribution("constant", s)) for name, s in SECONDS.items()},
        rewards=Rewards(parse_distribution("uniform:1:3"), 8),
        validation=validation,
        dispatch_s=dict.fromkeys([*SECONDS, "reward_request", "reward_collect", "advantage", "val_score"], dispatch_s),
    )


def run(workload: Workload, policy: str | SchedulingPolicy = "baseline") -> Trace:
    """A trace as a real run would leave it: with a mark for each reward request."""
    under = preset(policy, workload.mini_batches) if isinstance(policy, str) else policy
    trace = simulate(workload, under)[0]
    facts = {"pipeline": json.loads(json.dumps(workload.pipeline.facts())), "concurrency": workload.rewards.concurrency}
    facts |= {key: getattr(workload, key) for key in ("prompts", "responses", "mini_batches")}
    trace.meta |= {"policy": policy, "job": facts}
    for step in range(1, workload.steps + 1):
        for at, seconds in enumerate(workload.requests(step, range(workload.prompts)).seconds):
            group, sample = divmod(at, workload.responses)
            trace.marks.append(Mark("reward", "reward", 0.0, seconds, {"step": step, "group": group, "sample": sample}))
        if step % 4 == 0:
            for seconds in workload.val_requests(step).seconds:
                trace.marks.append(Mark("reward", "reward", 0.0, seconds, {"step": step, "validation": True}))
    return trace
