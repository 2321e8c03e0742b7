"""The cost of a plan: seconds of `dataflow plan` for the published workload, relative to a loop of plain Python.

    python benchmarks/plan.py

The workload has 105 steps of 5,120 rewards, 256 in flight, with delays uniform in 1..40 s; a plan simulates it under
five policies, and for its advice under a few more settings. The loop serves the same rewards five times, each in the
slot of a heap that is free first, and does nothing else. Both are measured in turn, several times. Prints a table,
writes JSON, and exits with 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from _run import begin, table

from dataflow.planning.plan import make_plan
from dataflow.planning.simulation.outcomes import processes

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
BOUNDS = {"cpu": 9.0, "wall": 8.0}
"""Seconds of a plan over those of the loop: processor time of all processes, and time of the clock."""


def loop(steps: int) -> None:
    """Serves the rewards of a run one by one, once for each policy."""
    draw = Random(0).random
    for _ in range(POLICIES):
        free = [0.0] * SLOTS
        for _ in range(steps * REWARDS):
            start = free[0]
            heapq.heapreplace(free, start + 1.0 + 39.0 * draw())


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Returns the seconds of some work: of all processes, ended children included, and of the clock."""
    begin, spent = time.perf_counter(), _spent()
    work()
    return {"cpu": _spent() - spent, "wall": time.perf_counter() - begin}


def _spent() -> float:
    of = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in of)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("-o", dest="out", default="plan.json")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.yaml"
        costs.write_text(f"steps: {options.steps}{COSTS}")
        # Each plan draws its latencies anew.
        rounds = [
            {
                "loop": measured(lambda: loop(options.steps)),
                "plan": measured(lambda n=n: make_plan(str(costs), [f"seed={n}"])),  # type: ignore[misc]
            }
            for n in range(options.rounds)
        ]
    ratios = {kind: statistics.median(r["plan"][kind] / r["loop"][kind] for r in rounds) for kind in BOUNDS}
    lines = [("seconds", "loop", "plan", "plan / loop", "bound", "held")]
    for kind, bound in BOUNDS.items():
        times = [statistics.median(r[what][kind] for r in rounds) for what in ("loop", "plan")]
        held = "yes" if ratios[kind] <= bound else "MISSED"
        lines.append((kind, *(f"{t:.2f}" for t in times), f"{ratios[kind]:.2f}", f"{bound:g}", held))
    print(table(lines))
    print(f"\n{processes()} of {os.cpu_count()} cores, {options.rounds} rounds, median")
    good = all(ratios[kind] <= bound for kind, bound in BOUNDS.items())
    Path(options.out).write_text(
        json.dumps({"rounds": rounds, "ratios": ratios, "bounds": BOUNDS, "cores": processes(), "held": good}, indent=1)
    )
    return not good


if __name__ == "__main__":
    begin(main, ["--rounds", "1", "--steps", "5"])
