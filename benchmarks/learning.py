"""Whether the default run learns as well with vLLM as with transformers: held-out accuracy over the seeds.

    python benchmarks/learning.py [steps=30] [--seeds 3]

Each seed is run once with each engine, with a judge that answers at once. Accuracy is the mean of the last three
evaluations. Prints a table and writes JSON; exits with 1 if the engines' means are more than 5 points apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _run import begin, finish, start, table

ENGINES = ("hf", "vllm")
BOUND = 0.05


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the pipeline, such as steps=30")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("-o", dest="out", default="learning.json")
    parser.add_argument("--runs", help="keep the runs here; existing ones are not repeated")
    options = parser.parse_args(arguments)
    given = dict(item.split("=", 1) for item in options.overrides)
    keys: dict[str, Any] = {"policy": "both", "judge.time_scale": 0, **given}
    runs = Path(options.runs or tempfile.mkdtemp(prefix="dataflow-learning-"))
    after: dict[str, list[float]] = {name: [] for name in ENGINES}
    before: list[float] = []
    for seed in range(options.seeds):
        for name in ENGINES:
            summary = runs / f"{name}-{seed}" / "summary.json"
            if not summary.is_file():
                print(f"{name}, seed {seed} ...", file=sys.stderr, flush=True)
                finish(start(runs, f"{name}-{seed}", **keys, **{"seed": seed, "engine.rollout": name}))
            found = json.loads(summary.read_text())
            after[name].append(found["accuracy_mean_last_3"])
            before.append(found["accuracy_before"])
    means = {name: statistics.fmean(values) for name, values in after.items()}
    lines = [("engine", "accuracy after", "each seed")]
    lines += [(name, f"{means[name]:.3f}", " ".join(f"{v:.3f}" for v in after[name])) for name in ENGINES]
    print(table(lines))
    apart = abs(means["hf"] - means["vllm"])
    print(f"before: {statistics.fmean(before):.3f}; the means are {100 * apart:.1f} points apart (bound 5)")
    Path(options.out).write_text(json.dumps({"before": before, "after": after, "apart": apart}, indent=2) + "\n")
    return 0 if apart <= BOUND else 1


if __name__ == "__main__":
    begin(main, ["steps=3", "val.every=1", "--seeds", "1"])
