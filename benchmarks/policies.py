"""Real wall time of the four policies in one run on this machine, as ratios.

    python benchmarks/policies.py [steps=20] [out=DIR]

The judge's delays (uniform 1..40 s) are scaled so that a step's reward service takes as long as its GPU-pool work,
which a short run measures first. Expected: baseline > mini-batch > both, baseline > off-policy > both, and ``both``
within 10% of max(GPU-pool busy time, reward service time), which no order of the work can beat. Prints a table, then
JSON; exits with 1 if the order or the bound does not hold.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import begin, finish, parsed, start, table, whole

POLICIES = ("baseline", "mini-batch", "off-policy", "both")
CONCURRENCY, MEAN_DELAY_S, SAMPLES = 64, 20.5, 32 * 8
BOUND = 1.10


def measure(runs: Path, steps: int) -> list[dict[str, Any]]:
    """Runs all four policies one after another, with the same seed and the same distribution of delays."""
    base = {"engine__rollout": "hf", "val__every": 0}  # always installed, so that figures can be compared
    probe = finish(start(runs, "probe", policy="baseline", steps=4, judge__time_scale=0.002, **base))
    work = probe["gpu_busy_s"] / probe["steps"]
    scale = work * CONCURRENCY / (SAMPLES * MEAN_DELAY_S)
    print(f"GPU-pool work {work:.2f} s a step -> judge.time_scale={scale:.4f}", file=sys.stderr)
    rows = []
    for policy in POLICIES:
        print(f"running {policy} ...", file=sys.stderr)
        keys = {**base, "policy": policy, "steps": steps, "reward__concurrency": CONCURRENCY}
        rows.append(finish(start(runs, policy, **keys, judge__time_scale=round(scale, 5))))
    return rows


def main(arguments: list[str]) -> int:
    given = parsed(arguments, {"steps": "20", "out": ""}, "use steps=N out=DIR")
    steps, out = whole("steps", given["steps"]), given["out"]
    with tempfile.TemporaryDirectory() as temporary:
        rows = measure(Path(out or temporary), steps)
    first = rows[0]
    lines = [
        (
            "policy",
            "wall / baseline",
            "wall / lower bound",
            "GPU pool busy",
            "exposed wait",
            "wall s",
            "s / step",
        )
    ]
    result = []
    for row in rows:
        wall = row["wall_s"]
        ratio, over = wall / first["wall_s"], wall / row["lower_bound_s"]
        facts = (
            f"{ratio:.3f}",
            f"{over:.3f}",
            f"{row['gpu_busy_s'] / wall:.0%}",
            f"{row['exposed_wait_s'] / wall:.0%}",
        )
        lines.append((row["policy"], *facts, f"{wall:.1f}", f"{row['step_s']:.2f}"))
        result.append({k: row[k] for k in ("policy", "steps", "wall_s", "gpu_busy_s", "reward_service_s")})
        result[-1] |= {"wall_over_baseline": ratio, "wall_over_lower_bound": over}
    wall = {row["policy"]: row["wall_s"] for row in rows}
    held = {
        "baseline > mini-batch > both": wall["baseline"] > wall["mini-batch"] > wall["both"],
        "baseline > off-policy > both": wall["baseline"] > wall["off-policy"] > wall["both"],
        f"both <= {BOUND} x max(GPU pool, reward service)": wall["both"] <= BOUND * rows[-1]["lower_bound_s"],
    }
    print(table(lines))
    for what, holds in held.items():
        print(f"{'holds' if holds else 'DOES NOT HOLD'}: {what}")
    print(json.dumps({"rows": result, "held": held}))
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    begin(main, ["steps=2"])
