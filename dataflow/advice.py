"""Advice on a plan: what bounds the fastest policy and which knob would move it, each with its predicted gain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dataflow.planner import BOUNDS, Prediction, simulate, total_s
from dataflow.policy import MAX_STALENESS, PRESETS, STREAM, SchedulingPolicy, preset
from dataflow.workload import Workload

LEAST = 0.002
"""Gains below this share are not worth a sentence."""


def advise(workload: Workload, rows: Sequence[Prediction]) -> list[str]:
    """Returns what to do about it: a sentence each, with its predicted gain.

    Args:
        workload: that was planned.
        rows: its predictions.
    """
    if not rows:
        return []
    base = rows[0].total_s / (1 + rows[0].change)
    best = min((r for r in rows if not r.policy.endswith(STREAM)), key=lambda r: r.total_s, default=rows[0])
    policy = preset(best.policy, workload.mini_batches) if best.policy in PRESETS else None
    said = []
    if best.change < -0.005:
        said.append(f"{best.policy} is the fastest: {best.step_s:.4g} s a step, {best.change:+.0%} against baseline.")
    else:
        said.append("no policy gains: rewards hardly keep the GPUs waiting.")
    if policy is None:
        return said
    said.append(_about_the_bound(workload, policy, best, base))

    def gain(other: Workload, what: SchedulingPolicy) -> float:
        return total_s(simulate(other, what)[0]) / best.total_s - 1

    changes: list[tuple[str, Workload, SchedulingPolicy]] = []
    if workload.rewards.agent == "per-step":
        steady = replace(workload, rewards=replace(workload.rewards, agent="continuous"))
        changes.append(("a reward agent that keeps all slots busy (reward.agent=continuous)", steady, policy))
    if workload.validation is not None and not workload.validation.overlap:
        changes.append(("validation beside training (validation.overlap=true)", workload.overlapping(), policy))
    if len(changes) == 2:
        both = changes[0][1].overlapping()
        changes.append(("the two together", both, policy))
    if workload.pipeline.streaming:
        name = f"rewards asked for as groups finish ({best.policy}{STREAM})"
        changes.append((name, workload, replace(policy, stream_rollout=True)))
    for what, other, under in changes:
        change = gain(other, under)
        if change < -LEAST:
            said.append(f"{what} would take {-change:.1%} off {best.policy}.")
    return said


def _about_the_bound(workload: Workload, policy: SchedulingPolicy, best: Prediction, base: float) -> str:
    """What sets the lower bound of the best policy, and what would move it."""
    rewards, gpu = workload.rewards, workload.mean_s("gpu")
    calls = workload.prompts * workload.responses
    if best.bound_by == BOUNDS["reward"]:
        each, load = rewards.latency.mean, calls * rewards.seconds
        if rewards.rpm and calls * 60 / rewards.rpm >= calls * each / rewards.concurrency:
            wanted = math.ceil(calls * 60 / gpu)
            changed = replace(rewards, rpm=float(wanted))
            why = f"{calls:,} calls at {rewards.rpm:,.0f} a minute"
            turn = f"{wanted:,} a minute"
        else:
            wanted = math.ceil(calls * each / gpu)
            changed = replace(rewards, concurrency=wanted)
            why = f"{calls:,} calls x {each:.1f} s / {rewards.concurrency:,} in flight"
            turn = f"{wanted:,} in flight"
        change = total_s(simulate(replace(workload, rewards=changed), policy)[0]) / base - 1
        return (
            f"the reward service bounds {best.policy}: {why} = {load:.4g} s a step against {gpu:.4g} s of GPU work; "
            f"{turn} would make the GPUs the limit ({change:+.0%} against baseline)."
        )
    if best.bound_by == BOUNDS["gpu"]:
        shares = {
            s.name: workload.times[s.name].mean / (s.every or 1)
            for s in workload.pipeline.stages
            if s.on == "gpu" and s.name in workload.times
        }
        largest = max(shares, key=lambda name: shares[name])
        return (
            f"the GPU pool bounds {best.policy}: {gpu:.4g} s of work a step, {best.gpu_idle:.1%} idle; more rewards in "
            f"flight cannot help; its largest stage is {largest} ({shares[largest] / gpu:.0%})."
        )
    said = f"the critical path bounds {best.policy}: a step waits for its slowest rewards, or for its validation"
    if policy.max_staleness < MAX_STALENESS:
        more = replace(policy, max_staleness=policy.max_staleness + 1)
        change = total_s(simulate(workload, more)[0]) / best.total_s - 1
        if change < -LEAST:
            return f"{said}; max_staleness={more.max_staleness} would take {-change:.1%} off it."
    return f"{said}."
