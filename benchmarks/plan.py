"""The cost of a plan: seconds of `dataflow plan` for the published workload, beside a loop of plain Python.

    python benchmarks/plan.py

The workload has 105 steps of 5,120 rewards, 256 in flight, with delays uniform in 1..40 s; a plan simulates it under
five policies, and for its advice under a few more settings. The loop serves the same rewards five times, each in the
slot of a heap that is free first, and does nothing else. Both run in one process, in turn, several times. Prints a
table, writes JSON, and exits with 1 if the bound is missed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from _run import begin, table

from dataflow.planning.plan import make_plan

STEPS, REWARDS, SLOTS, POLICIES = 105, 5120, 256, 5
COSTS = """
prompts: 1024
responses: 5
mini_batches: 4
stages: {rollout: 40, old_log_prob: 45, ref_log_prob: 36, actor_update: 117, val_rollout: 30, checkpoint: 20}
reward: {latency: uniform:1:40, concurrency: 256}
validation: {every: 5, samples: 1319, pool: own}
checkpoint: {every: 20}
"""
BOUND_S = 10.0
"""Seconds of processor time of a plan."""


def loop(steps: int) -> None:
    """Serves the rewards of a run one by one, once for each policy."""
    draw = Random(0).random
    for _ in range(POLICIES):
        free = [0.0] * SLOTS
        for _ in range(steps * REWARDS):
            heapq.heapreplace(free, free[0] + 1.0 + 39.0 * draw())


def measured(work: Callable[[], object]) -> float:
    """Returns the seconds of processor time that some work takes."""
    spent = time.process_time()
    work()
    return time.process_time() - spent


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("-o", dest="out", default="plan.json")
    options = parser.parse_args(arguments)
    loops, plans = [], []
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.yaml"
        costs.write_text(f"steps: {options.steps}{COSTS}")
        for n in range(options.rounds):
            loops.append(measured(lambda: loop(options.steps)))
            # Each plan draws its latencies anew.
            plans.append(measured(lambda n=n: make_plan(str(costs), [f"seed={n}"])))  # type: ignore[misc]
    took, base = statistics.median(plans), statistics.median(loops)
    held = took <= BOUND_S
    lines = [("loop", "plan", "plan / loop", "bound", "held")]
    lines.append(
        (f"{base:.2f} s", f"{took:.2f} s", f"{took / base:.2f}", f"{BOUND_S:g} s", "yes" if held else "MISSED")
    )
    print(table(lines))
    Path(options.out).write_text(
        json.dumps({"loop_s": loops, "plan_s": plans, "bound_s": BOUND_S, "held": held}, indent=1)
    )
    return not held


if __name__ == "__main__":
    begin(main, ["--rounds", "1", "--steps", "5"])
