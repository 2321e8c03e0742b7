"""What it costs to hand on from one task to the next in a step of the default run, whose steps take about a second.

    python benchmarks/hand_offs.py [steps=40] [policy=both] [out=hand_offs.json]

The default run with transformers and a judge that answers at once, so that every task in the GPU pool can begin when
the one before it has ended. Prints the time between them by the pair of stages, median and fastest tenth, and the sum
of a step; writes JSON; exits with 1 if the median of the sums is over the bound.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import begin, finish, parsed, refuse, start, table, whole

from dataflow.errors import PolicyError
from dataflow.policy import AUTO, preset
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Span

BOUND_MS = 30.0
SKIPPED = 3
"""Steps at the begin, in which the pipeline is filled and the processes warm up."""
FEWEST = SKIPPED + 3
"""Steps of a run: the last one is skipped, too, and fewer than two are too few to judge."""
USE = "use steps=N policy=NAME out=FILE"


def between(spans: Sequence[Span]) -> tuple[dict[tuple[str, str], list[float]], list[float]]:
    """Returns the seconds from each task of the GPU pool to the next, by their stages, and their sum in each step."""
    work = sorted((s for s in spans if s.resource == "gpu" and not s.optional), key=lambda s: s.begin)
    pairs: dict[tuple[str, str], list[float]] = defaultdict(list)
    sums: dict[int, float] = defaultdict(float)
    last = max(s.step for s in work)
    for one, other in pairwise(work):
        if SKIPPED < other.step < last:
            pairs[one.stage, other.stage].append(other.begin - one.end)
            sums[other.step] += other.begin - one.end
    return pairs, [sums[step] for step in sorted(sums)]


def main(arguments: list[str]) -> int:
    given = parsed(arguments, {"steps": "40", "policy": "both", "out": "hand_offs.json"}, USE)
    steps = whole("steps", given["steps"], FEWEST, "so that there are steps to judge")
    policy, out = given["policy"], given["out"]
    if policy != AUTO:
        try:
            preset(policy, mini_batches=1)
        except PolicyError as error:
            refuse(str(error))
    keys = {"policy": policy, "steps": steps, "engine__rollout": "hf", "val__every": 0, "judge__time_scale": 0.0005}
    with tempfile.TemporaryDirectory() as runs:
        finish(start(Path(runs), "run", **keys))
        pairs, sums = between(perfetto.load(str(Path(runs, "run"))).spans)
    lines = [("from", "to", "number", "median ms", "fastest tenth ms")]
    for (one, other), seconds in sorted(pairs.items()):
        cells = [f"{1000 * of:.1f}" for of in (statistics.median(seconds), fastest(seconds))]
        lines.append((one, other, f"{len(seconds)}", *cells))
    found = {"median_ms": 1000 * statistics.median(sums), "fastest_tenth_ms": 1000 * fastest(sums)}
    lines.append(("all of a step", "", f"{len(sums)}", *(f"{ms:.1f}" for ms in found.values())))
    print(table(lines))
    held = found["median_ms"] <= BOUND_MS
    print(f"\nbound: {BOUND_MS:.0f} ms a step: {'held' if held else 'MISSED'}; figures in {out}")
    Path(out).write_text(json.dumps({**found, "bound_ms": BOUND_MS, "steps": steps, "policy": policy}, indent=1) + "\n")
    return not held


def fastest(seconds: Sequence[float]) -> float:
    """Returns the largest of the fastest tenth."""
    return sorted(seconds)[len(seconds) // 10]


if __name__ == "__main__":
    begin(main, ["steps=6"])
