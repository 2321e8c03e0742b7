"""Advice on a plan: what bounds the fastest policy, and the predicted gain of each change that would help."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dataflow.drawing.duration import figure
from dataflow.errors import counted
from dataflow.planning.config import MOST_IN_FLIGHT
from dataflow.planning.planner import BOUNDS, Prediction, bound_of
from dataflow.planning.simulation import Outcomes
from dataflow.planning.workload import Workload
from dataflow.policy import MAX_STALENESS, STREAM, SchedulingPolicy, preset

LEAST = 0.002
"""Gains below this share are left out."""
_HARDLY = 0.1
"""Idle share of the GPUs below which no policy can gain much."""
ON_POLICY = f"mini-batch{STREAM}"
"""The policy that overlaps most without stale samples."""


def advise(
    workload: Workload,
    rows: Sequence[Prediction],
    policies: Mapping[str, SchedulingPolicy],
    outcomes: Outcomes | None = None,
) -> list[str]:
    """Returns sentences of advice, each with its predicted gain."""
    outcomes = outcomes or Outcomes()
    whole = [row for row in rows if not policies[row.policy].stream_rollout]
    if not whole:
        return []
    best = min(whole, key=lambda row: row.total_s)
    base, policy = best.total_s / (1 + best.change), policies[best.policy]
    advice = [_fastest(workload, rows, best)]
    if best.total_s <= 0:
        return advice
    advice.append(_about_the_bound(workload, policy, best, base, outcomes))
    changes: list[tuple[str, Workload, SchedulingPolicy]] = []
    if workload.rewards.agent == "per-step":
        steady = replace(workload, rewards=replace(workload.rewards, agent="continuous"))
        changes.append(("a reward agent that keeps all slots busy (reward.agent=continuous)", steady, policy))
    if workload.pipeline.streaming:
        streamed = replace(policy, stream_rollout=True)
        changes.append((f"rewards requested as groups finish ({best.policy}{STREAM})", workload, streamed))
    for what, other, under in changes:
        gain = 1 - outcomes.of(other, under).total_s / best.total_s
        if gain > LEAST:
            advice.append(f"{what} would take {gain:.1%} off the time of '{best.policy}'.")
    if policy.max_staleness and workload.pipeline.streaming:
        strict = {row.policy: row.change for row in rows if not policies[row.policy].max_staleness}
        strict[ON_POLICY] = outcomes.of(workload, preset(ON_POLICY, workload.mini_batches)).total_s / base - 1
        name = min(strict, key=lambda name: strict[name])
        found = f"{name} is the fastest: {strict[name]:+.0%} against baseline"
        advice.append(f"strictly on-policy, {found if strict[name] <= -LEAST else 'nothing is faster than baseline'}.")
    return advice


def _fastest(workload: Workload, rows: Sequence[Prediction], best: Prediction) -> str:
    """Returns a sentence on the fastest policy; ``best`` is the fastest that does not stream."""
    if best.change < -0.005:
        fastest = min(rows, key=lambda row: row.total_s)
        first = fastest if fastest.total_s < best.total_s * (1 - LEAST) else best
        rest = "" if first is best else f"; without streaming, {best.policy} is: {figure(best.step_s)} s"
        return (
            f"{first.policy} is the fastest: {figure(first.step_s)} s a step, {first.change:+.0%} against "
            f"baseline{rest}."
        )
    if workload.steps == 1:
        return "no policy is faster than baseline over one step; give steps=100 to see what overlapping steps gains."
    why = ": the GPUs hardly wait for rewards" if best.gpu_idle < _HARDLY else ""
    return f"no policy is faster than baseline{why}."


def _about_the_bound(
    workload: Workload, policy: SchedulingPolicy, best: Prediction, base: float, outcomes: Outcomes
) -> str:
    """Returns a sentence on what sets the lower bound of the best policy, and what would change it."""
    if workload.mean_s() <= 0:
        return f"no stage of {best.policy} takes time on the GPUs, so that there is nothing to overlap rewards with."
    agent = next((name for name in workload.agents if bound_of(name) == best.bound_by), None)
    if agent is not None:
        rewards, calls = workload.service_of(agent), workload.prompts * workload.responses
        # Of the policy's own run, as the bounds are: the work of a validation after the last step bounds nothing.
        gpu = best.per_step(best.bounds_s[BOUNDS["gpu"]])
        each, load = rewards.latency.mean, calls * rewards.seconds
        if rewards.rpm and calls * 60 / rewards.rpm >= calls * each / rewards.concurrency:
            wanted = math.ceil(calls * 60 / gpu)
            changed = replace(rewards, rpm=float(wanted))
            why, turn = f"{counted(calls, 'call')} at {rewards.rpm:,.0f} a minute", f"{wanted:,} a minute would"
        else:
            wanted = math.ceil(calls * each / gpu)
            changed = replace(rewards, concurrency=min(wanted, MOST_IN_FLIGHT))
            why = f"{counted(calls, 'call')} x {figure(each, 3)} s / {rewards.concurrency:,} in flight"
            turn = f"{wanted:,} in flight would"
        change = outcomes.of(workload.with_service(agent, changed), policy).total_s / base - 1
        return (
            f"the {best.bound_by} bounds {best.policy}: {why} = {figure(load)} s a step against {figure(gpu)} s of GPU "
            f"work; {turn} make the GPUs the limit ({change:+.0%} against baseline)."
        )
    if best.bound_by == BOUNDS["gpu"]:
        shares = workload.work_s()
        largest = max(shares, key=lambda name: shares[name])
        return (
            f"the GPU pool bounds {best.policy}: {figure(best.lower_bound_step_s)} s of work a step, "
            f"{best.gpu_idle:.1%} idle, which is the most that more rewards in flight could take off; its "
            f"largest stage is {largest} ({shares[largest] / workload.mean_s():.0%})."
        )
    waits = best.exposed_wait_by_cause
    cause = max(waits, key=lambda name: waits[name], default="rewards")
    why = "its slowest rewards, or for its validation" if cause == "rewards" else cause
    advice = f"the critical path bounds {best.policy}: a step waits for {why}"
    if policy.max_staleness < MAX_STALENESS:
        more = replace(policy, max_staleness=policy.max_staleness + 1)
        change = outcomes.of(workload, more).total_s / best.total_s - 1
        if change < -LEAST:
            return f"{advice}; max_staleness={more.max_staleness} would take {-change:.1%} off it."
    return f"{advice}."
