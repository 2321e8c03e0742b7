"""Measured against predicted: the default pipeline under each policy, and what the baseline's trace said it would take.

    python benchmarks/prediction.py steps=15

Prints a table and writes JSON. The prediction knows the baseline's trace alone; its own row checks the model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _run import finish, start, table

from dataflow.plan_config import PlanConfig
from dataflow.planner import predict
from dataflow.policy import PRESETS, preset
from dataflow.sources.trace import workload

BOUND = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the pipeline, such as steps=15")
    parser.add_argument("-o", dest="out", default="prediction.json")
    parser.add_argument("--runs", help="keep the runs here; those that are there are not made again")
    options = parser.parse_args()
    given = dict(item.split("=", 1) for item in options.overrides)
    keys: dict[str, Any] = {"steps": "15", "seed": "0", **given}
    runs = Path(options.runs or tempfile.mkdtemp(prefix="dataflow-prediction-"))
    rows = []
    for name in PRESETS:
        summary = runs / name / "summary.json"
        if not summary.is_file():
            print(f"{name} ...", file=sys.stderr)
            finish(start(runs, name, policy=name, **keys))
        rows.append(json.loads(summary.read_text()))
    load = workload(runs / "baseline", PlanConfig())
    predicted = predict(load, {name: preset(name, load.mini_batches) for name in PRESETS})
    lines = [("policy", "measured s", "predicted s", "error", "measured / baseline", "predicted / baseline")]
    found = []
    for row, told in zip(rows, predicted, strict=True):
        error = told.total_s / row["wall_s"] - 1
        found.append({"policy": told.policy, "wall_s": row["wall_s"], "predicted_s": told.total_s, "error": error})
        lines.append(
            (
                told.policy,
                f"{row['wall_s']:.1f}",
                f"{told.total_s:.1f}",
                f"{error:+.1%}",
                f"{row['wall_s'] / rows[0]['wall_s']:.3f}",
                f"{1 + told.change:.3f}",
            )
        )
    print(table(lines))
    worst = max(abs(row["error"]) for row in found)
    print(f"largest error {worst:.1%}, bound {BOUND:.0%}")
    Path(options.out).write_text(json.dumps({"rows": found, "bound": BOUND, "assumptions": load.assumptions}, indent=1))
    sys.exit(worst > BOUND)


if __name__ == "__main__":
    main()
