"""`policy=auto` against the best fixed policy known afterwards, on the virtual clock.

    python benchmarks/auto.py --workers 2
    python benchmarks/auto.py --real 6

Runs workloads over a grid of judge latency, requests in flight, GPU work and raggedness, some of which change in
mid-run (the judge or the rollout becomes slower or faster), under every fixed policy and under auto, which sees only
its own trace. Prints a table, writes JSON, and exits with 1 if a bound is missed.
With --real it runs the first of six workloads with a tiny model on this machine instead, whose rewards take a given
time; the first and the last change in mid-run. Times of real runs vary by a few percent, so those below a minute run
three times, and the run of median length counts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import _real as real
from _run import begin, table

from dataflow.distribution import Distribution, parse_distribution
from dataflow.executors.base import Chunk, Done
from dataflow.executors.virtual import VirtualExecutor
from dataflow.graph import TaskGraph, TaskId
from dataflow.planning.auto import LEAST_LEFT, PolicyChooser, candidates, forecast, opening, window
from dataflow.planning.auto import STEPS as WINDOW
from dataflow.planning.costs import WorkloadCosts
from dataflow.planning.workload import Modelled, Rewards, Workload, grpo
from dataflow.policy import PolicySchedule, SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace

STEPS, PROMPTS, RESPONSES, MINI_BATCHES = 30, 8, 8, 2
MEDIAN, WORST, BASELINE = 1.01, 1.03, 1.01

LATENCIES = (0.3, 1.0, 3.0, 10.0)
"""Mean seconds of a reward request; a step has 64."""
CONCURRENCIES = (4, 16, 64)
GPU = ((1.0, 0.3, 1.0), (4.0, 1.0, 2.0), (3.0, 2.0, 8.0))
"""Seconds of rollout, log-probs and all updates of a step."""
RAGGED = (0.0, 0.4, 1.0)
"""Sigma of the lognormal latencies; a third of it is that of the rollouts' times."""
CHANGES = ((1.0, 1.0), (4.0, 1.0), (0.25, 1.0), (1.0, 3.0))
"""Factors of latency and of rollout time from the middle of the run on."""


@dataclass(frozen=True)
class Changing(Workload):
    """A workload whose rewards and rollouts take another time from a step on."""

    change_at: int = 0
    latency_factor: float = 1.0
    rollout_factor: float = 1.0

    def latencies(self, step: int, agent: str = "reward") -> list[float]:
        drawn = super().latencies(step, agent)
        return [s * self.latency_factor for s in drawn] if 0 < self.change_at <= step else drawn

    def seconds(self, name: str, step: int, part: int, parts: int) -> float:
        found = super().seconds(name, step, part, parts)
        return found * self.rollout_factor if name == "rollout" and 0 < self.change_at <= step else found


def workloads(count: int) -> list[dict[str, Any]]:
    """Returns the numbers of workloads: the grid, repeated with further changes and seeds until there are enough."""
    grid = list(itertools.product(CHANGES, LATENCIES, CONCURRENCIES, GPU, RAGGED))
    steady = [point for point in grid if point[0] == CHANGES[0]]
    changing = [point for point in grid if point[0] != CHANGES[0]]
    Random(0).shuffle(changing)
    chosen = (steady + changing)[:count] if count >= len(steady) else Random(0).sample(grid, count)
    keys = ("change", "latency_s", "concurrency", "gpu_s", "ragged")
    return [{**dict(zip(keys, point, strict=True)), "seed": n} for n, point in enumerate(chosen)]


def workload(point: dict[str, Any]) -> Changing:
    """Returns the workload of one point of the grid."""
    rollout, log_probs, updates = point["gpu_s"]
    ragged, latency = point["ragged"], point["latency_s"]
    drawn = parse_distribution(f"lognormal:{latency}:{ragged}") if ragged else Distribution("constant", latency)
    times = {"old_log_prob": log_probs, "actor_update": updates, "sync_weights": 0.1}
    modelled = {name: Modelled(Distribution("constant", seconds)) for name, seconds in times.items()}
    of = parse_distribution(f"lognormal:{rollout}:{ragged / 3}") if ragged else Distribution("constant", rollout)
    change, factors = STEPS // 2 + 1, point["change"]
    return Changing(
        source="benchmark",
        pipeline=grpo(False),
        steps=STEPS,
        prompts=PROMPTS,
        responses=RESPONSES,
        mini_batches=MINI_BATCHES,
        times={**modelled, "rollout": Modelled(of)},
        rewards=Rewards(drawn, point["concurrency"]),
        seed=point["seed"],
        change_at=change if factors != CHANGES[0] else 0,
        latency_factor=factors[0],
        rollout_factor=factors[1],
    )


class MarkingExecutor(VirtualExecutor):
    """A virtual executor that records the reward requests of each part that was collected, as an agent does."""

    def __init__(self, load: Workload, graph: TaskGraph) -> None:
        super().__init__(WorkloadCosts(load, graph))
        self._load = load
        self._drawn: tuple[int, list[float]] = (0, [])

    def _push(self, at: float, event: Done | Chunk) -> None:
        if isinstance(event, Done) and event.report is not None and event.report.groups is not None:
            event.report.marks = [
                {"name": "reward", "begin": at - seconds, "end": at} for seconds in self._seconds(event.id, event)
            ]
        super()._push(at, event)

    def _seconds(self, i: TaskId, event: Done) -> list[float]:
        if self._drawn[0] != i.step:
            self._drawn = (i.step, self._load.latencies(i.step))
        assert event.report is not None
        n = self._load.responses
        return [s for g in event.report.groups or () for s in self._drawn[1][g * n : (g + 1) * n]]


def run(
    load: Workload,
    policy: SchedulingPolicy | PolicySchedule,
    on_step: Callable[[Runner, int, float], None] | None = None,
) -> float:
    """Runs a workload on the virtual clock; returns its seconds."""
    graph = expand(load.pipeline, policy, load.steps, load.mini_batches, groups=load.prompts)
    executor = MarkingExecutor(load, graph) if on_step else VirtualExecutor(WorkloadCosts(load, graph))
    job = {"pipeline": load.pipeline.facts(), "prompts": load.prompts, "responses": load.responses}
    job |= {"mini_batches": load.mini_batches, "concurrency": load.rewards.concurrency}
    trace = Trace(
        meta={"resources": dict(load.pipeline.resources), "steps": load.steps, "status": "running", "job": job}
    )
    end = 0.0

    def ended(step: int, _metrics: object) -> None:
        nonlocal end
        end = executor.now()
        # A run keeps all of its trace; a plan reads its end alone.
        trace.spans[:] = [s for s in trace.spans if s.step > step - 2 * WINDOW]
        trace.marks[:] = [m for m in trace.marks if m.args["step"] > step - 2 * WINDOW]
        if on_step is not None:
            on_step(runner, step, end)

    inputs: dict[str, Callable[[int], Any]] = dict.fromkeys(load.pipeline.inputs, lambda step: None)
    runner = Runner(graph, executor, inputs=inputs, trace=trace, origin=0.0, on_step=ended)
    asyncio.run(runner.run())
    return end


def auto(load: Workload, policies: list[SchedulingPolicy]) -> tuple[float, list[tuple[int, str]]]:
    """Runs a workload under auto; returns its seconds and the changes of policy."""
    schedule, switches = opening(policies), []
    since, current = schedule.changes[-1]
    chooser = PolicyChooser(policies, current, since=2, shows=since + current.max_staleness + 1)

    def on_step(runner: Runner, step: int, now: float) -> None:
        if not chooser.ended(step, now, runner.trace) or step > load.steps - LEAST_LEFT:
            return
        chooser.planned(step)
        found = window(runner.trace, chooser.since, step)
        assert found is not None
        # A plan runs an event loop of its own.
        seconds = other.submit(forecast, found, policies).result()
        wanted = chooser.decide({p: s for p, s in zip(policies, seconds, strict=True) if s is not None})
        if wanted is not None and (first := runner.switch(wanted)) is not None:
            chooser.switched(first, wanted)
            switches.append((first, name(wanted)))

    with ThreadPoolExecutor(1) as other:
        return run(load, schedule, on_step), switches


def compared(auto_s: float, fixed: dict[str, float], baseline: str) -> dict[str, Any]:
    """Returns the seconds of auto beside those of the fixed policies."""
    best = min(fixed, key=lambda policy: fixed[policy])
    return {
        "auto_s": auto_s,
        "baseline_s": fixed[baseline],
        "best": best,
        "best_s": fixed[best],
        "ratio": auto_s / fixed[best],
        "to_baseline": auto_s / fixed[baseline],
    }


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """Returns the times of a workload under every fixed policy and under auto."""
    load = workload(point)
    policies = candidates(load.pipeline, load.mini_batches, load.prompts, limit=1, order="arrival")
    fixed = {name(policy): run(load, policy) for policy in policies}
    seconds, switches = auto(load, policies)
    return {**point, **compared(seconds, fixed, name(SchedulingPolicy())), "switches": switches}


def name(policy: SchedulingPolicy) -> str:
    """Returns a policy in a few characters."""
    return f"{policy.split}/{policy.max_staleness}{'+stream' if policy.stream_rollout else ''}"


def measure_real(count: int, out: str) -> bool:
    """Runs some real workloads under each preset and under auto; prints their times; returns whether bounds hold."""
    lines = [("rewards of a step", "baseline", "best preset", "", "auto", "auto / best", "auto / baseline")]
    rows = []
    for row in real.measure(count):
        times = dict(row["runs"])
        rows.append({**row, **compared(times.pop("auto"), times, "baseline")})
        first, later = row["waits_s"]
        waits = f"{first:g} s" + (f", later {later:g} s" if later != first else "")
        found = rows[-1]
        seconds = [f"{found[key]:.1f} s" for key in ("baseline_s", "best_s", "auto_s")]
        ratios = [f"{found[key]:.3f}" for key in ("ratio", "to_baseline")]
        lines.append((waits, seconds[0], found["best"], seconds[1], seconds[2], *ratios))
    print(table(lines))
    return judged(rows, out)


def judged(rows: Sequence[dict[str, Any]], out: str) -> bool:
    """Writes what was found, with the bounds; prints and returns whether they hold."""
    ratios = [row["ratio"] for row in rows]
    found = {"median": statistics.median(ratios), "worst": max(ratios), "baseline": max(r["to_baseline"] for r in rows)}
    bounds = {"median": MEDIAN, "worst": WORST, "baseline": BASELINE}
    good = all(found[key] <= bounds[key] for key in bounds)
    Path(out).write_text(json.dumps({"rows": rows, "found": found, "bounds": bounds}, indent=1))
    print(f"\nbounds: {', '.join(f'{key} {value:g}' for key, value in bounds.items())}: {'held' if good else 'MISSED'}")
    return good


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("-o", dest="out", default="auto.json")
    parser.add_argument("--real", type=int, metavar="N", help="run N real workloads, at most 6, instead")
    options = parser.parse_args(arguments)
    for name in ("workloads", "workers", "real"):
        if (number := getattr(options, name)) is not None and number < 1:
            parser.error(f"--{name}: give 1 or more.")
    if options.real is not None:
        return not measure_real(options.real, options.out)
    points = workloads(options.workloads)
    with ProcessPoolExecutor(options.workers) as pool:
        jobs = [pool.submit(measure, point) for point in points]
        rows = []
        for job in jobs:
            rows.append(job.result())
            print(f"\r{len(rows)} of {len(points)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    lines = [("workloads", "number", "auto / best, median", "worst", "auto / baseline, worst", "switches, mean")]
    kinds = {"steady": [row for row in rows if tuple(row["change"]) == CHANGES[0]]}
    kinds |= {"changing in mid-run": [row for row in rows if row not in kinds["steady"]], "all": rows}
    for kind, of in kinds.items():
        if of:
            ratios = [row["ratio"] for row in of]
            cells = [f"{len(of)}", f"{statistics.median(ratios):.3f}", f"{max(ratios):.3f}"]
            cells += [f"{max(row['to_baseline'] for row in of):.3f}"]
            lines.append((kind, *cells, f"{statistics.fmean(len(row['switches']) for row in of):.1f}"))
    print(table(lines))
    return not judged(rows, options.out)


if __name__ == "__main__":
    begin(main, ["--workloads", "1"])
