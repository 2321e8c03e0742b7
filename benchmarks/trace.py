"""The cost of the trace: microseconds to write a span or request during a run, and the share of the run's time.

    python benchmarks/trace.py

The run has 20 steps of 64 groups with 4 samples, on the virtual clock with the stage times of a fast run; each of its
tasks is written with its requests, as the runner does it. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _run import begin, table

from dataflow.distribution import Distribution, parse_distribution
from dataflow.planning.simulation import simulate
from dataflow.planning.workload import Modelled, Rewards, Workload, grpo
from dataflow.policy import preset
from dataflow.timeline import perfetto
from dataflow.timeline.perfetto import TraceWriter
from dataflow.timeline.spans import Level, Mark, Span, Trace

BOUND_US = 20.0
BOUND_SHARE = 0.01
STEPS, GROUPS, SAMPLES, MINI_BATCHES = 20, 64, 4, 4
SECONDS = {"rollout": 2.0, "old_log_prob": 0.5, "actor_update": 1.5, "sync_weights": 0.1}
Item = Span | Mark | Level


def request(step: int, group: int, sample: int, begin: float, end: float, **facts: Any) -> Mark:
    """Returns a mark like the reward agent's."""
    own = {
        "step": step,
        "group": group,
        "sample": sample,
        "tries": 1,
        "tokens": 128,
        "queued_s": 0.25,
        "held_by": "slot",
    }
    return Mark("reward", "reward", begin, end, {**own, **facts} if facts else own)


def spans(n: int, facts: dict[str, Any]) -> list[list[Item]]:
    """Returns tasks, each in a list of its own."""
    return [[Span("actor_update", i, 0, 1, "gpu", i + 0.1, i + 0.9, facts, f"advantage[{i}]")] for i in range(n)]


def tasks(trace: Trace) -> list[list[Item]]:
    """Returns the items that the runner records: a list per task, with the requests of its part and a limit."""
    recorded: list[list[Item]] = []
    for span in trace.spans:
        items: list[Item] = [span]
        if span.stage == "reward_collect":
            each = GROUPS // span.parts
            items += [
                request(span.step, group, sample, span.begin, span.end, part=span.part)
                for group in range(span.part * each, (span.part + 1) * each)
                for sample in range(SAMPLES)
            ]
            items.append(Level("reward limit", span.end, 256.0))
        recorded.append(items)
    return recorded


def run() -> Trace:
    """Returns the trace that the planner predicts for the run under `both`."""
    workload = Workload(
        source="the size of a small run",
        pipeline=grpo(False, None),
        steps=STEPS,
        prompts=GROUPS,
        responses=SAMPLES,
        mini_batches=MINI_BATCHES,
        times={name: Modelled(Distribution("constant", seconds)) for name, seconds in SECONDS.items()},
        rewards=Rewards(parse_distribution("uniform:1:4"), 256),
        validation=None,
    )
    trace = simulate(workload, preset("both", MINI_BATCHES))[0]
    trace.meta |= {"policy": "both", "resources": {"gpu": 1, "reward": None, "controller": 1}, "status": "running"}
    trace.meta["job"] = {"pipeline": workload.pipeline.facts()}
    return trace


def best(of: Callable[[], float], rounds: int) -> float:
    return min(of() for _ in range(rounds))


def adding(recorded: Sequence[Sequence[Item]], path: Path) -> float:
    """Returns the seconds of all writes of a run, without the file's end."""
    with TraceWriter(path, {"status": "running"}) as writer:
        begin = time.perf_counter()
        for items in recorded:
            writer.add(*items)
        return time.perf_counter() - begin


def whole(trace: Trace, recorded: Sequence[Sequence[Item]], path: Path) -> float:
    """Returns the seconds to write the file of a run, from its first line to its last."""
    full = Trace(meta=trace.meta)
    for items in recorded:
        full.add(*items)
    begin = time.perf_counter()
    writer = TraceWriter(path, trace.meta)
    for items in recorded:
        writer.add(*items)
    writer.close(full)
    return time.perf_counter() - begin


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, default=20, help="rounds, of which the best counts, as the machine has other load"
    )
    parser.add_argument("-o", dest="out", default="trace_cost.json")
    options = parser.parse_args(arguments)
    trace = run()
    recorded = tasks(trace)
    facts = {"samples": 256, "weights_version": 3, "loss": 0.25, "shape": [64, 4], "how": "all at once"}
    requests: list[Item] = [request(1, i // 4, i % 4, 0.5 * i, 0.5 * i + 2) for i in range(256)]
    kinds = {
        "a span without facts": spans(500, {}),
        "a span with facts": spans(500, facts),
        "a request, 256 a task": [[span, *requests] for [span] in spans(4, {})],
        "the run's, as it goes": recorded,
    }
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        for name, items in kinds.items():
            seconds = best(lambda items=items: adding(items, path), options.rounds)  # type: ignore[misc]
            rows.append({"what": name, "us": 1e6 * seconds / sum(map(len, items))})
        took = best(lambda: whole(trace, recorded, path), options.rounds)
        size = path.stat().st_size
        back = best(lambda: reading(path), options.rounds)
    items_in_all = sum(map(len, recorded))
    share = took / trace.wall
    print(table([("written", "us each"), *((row["what"], f"{row['us']:.1f}") for row in rows)]))
    print()
    print(
        table(
            [
                ("run", "tasks", "items", "wall s", "trace s", "share", "MB", "read s"),
                (
                    f"{STEPS} steps",
                    f"{len(trace.spans):,}",
                    f"{items_in_all:,}",
                    f"{trace.wall:.1f}",
                    f"{took:.3f}",
                    f"{share:.3%}",
                    f"{size / 1e6:.1f}",
                    f"{back:.2f}",
                ),
            ]
        )
    )
    good = max(row["us"] for row in rows) <= BOUND_US and share <= BOUND_SHARE
    result = {"tasks": len(trace.spans), "items": items_in_all, "wall_s": trace.wall, "trace_s": took, "share": share}
    bounds = {"us": BOUND_US, "share": BOUND_SHARE}
    Path(options.out).write_text(json.dumps({"written": rows, "run": result, "bounds": bounds}, indent=1))
    print(f"\nbounds: {BOUND_US:g} us a span, {BOUND_SHARE:.0%} of the run: " + ("held" if good else "MISSED"))
    return not good


def reading(path: Path) -> float:
    begin = time.perf_counter()
    perfetto.read(path)
    return time.perf_counter() - begin


if __name__ == "__main__":
    begin(main, ["--rounds", "1"])
