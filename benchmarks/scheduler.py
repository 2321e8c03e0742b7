"""The cost of the scheduler: microseconds per task (handle and dispatch, no executor), and memory, by run length.

    python benchmarks/scheduler.py

Also the published workload, 105 steps of 5,120 rewards, through scheduler, runner, virtual clock and reward service.
Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
import tracemalloc
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _run import begin, table

from dataflow.distribution import Distribution, parse_distribution
from dataflow.planning.simulation import simulate
from dataflow.planning.workload import Modelled, Rewards, Validation, Workload, grpo
from dataflow.policy import expand, preset
from dataflow.scheduler import Instruction, Scheduler, Start, TaskFinished
from dataflow.testing import grpo_pipeline

BOUND_US = 50.0
BOUND_S = 5.0
BOUND_MB = 1024.0


def drive(steps: int, policy: str = "both") -> int:
    """Ends every task at once, in the order of their starts; returns their number."""
    graph = expand(grpo_pipeline(val_every=5), preset(policy, 4), steps, 4, groups=16)
    scheduler = Scheduler(graph)
    running: deque[Any] = deque()

    def take(instructions: Iterable[Instruction]) -> None:
        running.extend(i.task for i in instructions if type(i) is Start)

    take(scheduler.start())
    tasks = 0
    while running:
        task = running.popleft()
        part = task.id.part
        groups = tuple(range(part * 4, part * 4 + 4)) if task.stage.collects else None
        take(scheduler.handle(TaskFinished(task.id, 1.0, groups)))
        tasks += 1
    return tasks


def scheduler_rows(most: int) -> list[dict[str, float]]:
    """Returns time and memory of runs of 1e3, 1e4, ... tasks."""
    rows = []
    wanted = 1_000
    while wanted <= most:
        steps = max(2, round(wanted / 17.4))
        best = float("inf")
        for _ in range(3 if wanted <= 100_000 else 1):
            begin = time.perf_counter()
            tasks = drive(steps)
            best = min(best, (time.perf_counter() - begin) / tasks)
        peak = 0.0
        if wanted <= 100_000:  # tracing memory makes it ten times slower
            tracemalloc.start()
            drive(steps)
            peak = tracemalloc.get_traced_memory()[1] / 1024
            tracemalloc.stop()
        rows.append({"tasks": tasks, "us_per_task": best * 1e6, "peak_kib": peak})
        wanted *= 10
    return rows


def published(steps: int) -> dict[str, float]:
    """Simulates a workload of the published size under `both`, with constant stage times; returns the seconds taken."""
    validation = Validation(5, 1319, "own", overlap=False)
    times = {"rollout": 40.0, "old_log_prob": 45.0, "ref_log_prob": 36.0, "actor_update": 117.0, "val_rollout": 30.0}
    workload = Workload(
        source="the size of the published runs",
        pipeline=grpo(True, validation, 20),
        steps=steps,
        prompts=1024,
        responses=5,
        mini_batches=4,
        times={name: Modelled(Distribution("constant", seconds)) for name, seconds in times.items()},
        rewards=Rewards(parse_distribution("uniform:1:40"), 256, agent="per-step", scattered=True),
        validation=validation,
    )
    begin = time.perf_counter()
    simulate(workload, preset("both", 4))
    took = time.perf_counter() - begin
    return {"steps": steps, "rewards": steps * 5120, "seconds": took, "rss_mb": rss_mb()}


def rss_mb() -> float:
    """Returns the peak memory of this process so far."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most / (1024 if sys.platform != "darwin" else 1024 * 1024)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=1_000_000, help="longest run")
    parser.add_argument("--steps", type=int, nargs="+", default=[105, 420], help="of the virtual runs")
    parser.add_argument("-o", dest="out", default="scheduler.json")
    options = parser.parse_args(arguments)
    runs = [published(steps) for steps in options.steps]  # first, while nothing else has raised the peak memory
    rows = scheduler_rows(options.tasks)
    first = rows[0]["us_per_task"]
    lines = [("tasks", "us/task", "/ first", "peak KiB")]
    for row in rows:
        peak = f"{row['peak_kib']:.0f}" if row["peak_kib"] else "-"
        each = row["us_per_task"]
        lines.append((f"{row['tasks']:,.0f}", f"{each:.1f}", f"{each / first:.2f}", peak))
    print(table(lines))
    print()
    lines = [("virtual run", "rewards", "seconds", "most MB")]
    for run in runs:
        lines.append(
            (f"{run['steps']:.0f} steps", f"{run['rewards']:,.0f}", f"{run['seconds']:.2f}", f"{run['rss_mb']:.0f}")
        )
    print(table(lines))
    good = (
        max(row["us_per_task"] for row in rows) <= BOUND_US
        and runs[0]["seconds"] <= BOUND_S
        and runs[0]["rss_mb"] <= BOUND_MB
    )
    bounds = {"us_per_task": BOUND_US, "seconds": BOUND_S, "mb": BOUND_MB}
    Path(options.out).write_text(json.dumps({"scheduler": rows, "virtual": runs, "bounds": bounds}, indent=1))
    print(
        f"\nbounds: {BOUND_US:g} us a task, {BOUND_S:g} s and {BOUND_MB:g} MB for {options.steps[0]} steps: "
        + ("held" if good else "MISSED")
    )
    return not good


if __name__ == "__main__":
    begin(main, ["--tasks", "1000", "--steps", "20"])
