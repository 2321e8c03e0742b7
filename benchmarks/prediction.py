"""Measured against predicted: the default pipeline under each policy, and the prediction from the baseline's trace.

    python benchmarks/prediction.py steps=15

Each round runs the four policies one after another, starting with a different one, and predicts them from the trace of
its own baseline alone. Since the speed of a shared machine varies from minute to minute, the median of the rounds
counts. A further column has the error of the schedule's model alone: of a prediction from the measured stage times of
each run. Prints a table, writes JSON.
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

from dataflow.planning.config import PlanConfig
from dataflow.planning.plan import make_plan
from dataflow.planning.planner import predict
from dataflow.planning.sources.trace import workload
from dataflow.policy import PRESETS, preset

BOUND = 0.05


def measure(runs: Path, first: int, keys: dict[str, Any], policies: tuple[str, ...] = PRESETS) -> list[dict[str, Any]]:
    """Runs a round, starting with another policy each time; returns a row per policy. Existing runs are kept."""
    for name in policies[first:] + policies[:first]:
        if not (runs / name / "summary.json").is_file():
            print(f"{runs.name}: {name} ...", file=sys.stderr)
            finish(start(runs, name, policy=name, **keys))
    load = workload(runs / "baseline", PlanConfig())
    predicted = predict(load, {name: preset(name, load.mini_batches) for name in policies})
    rows = []
    for row in predicted:
        wall = json.loads((runs / row.policy / "summary.json").read_text())["wall_s"]
        own = make_plan(str(runs / row.policy), [])
        assert own.replay is not None
        assert own.logged_step_s is not None
        rows.append(
            {
                "policy": row.policy,
                "wall_s": wall,
                "predicted_s": row.total_s,
                "error": row.total_s / wall - 1,
                "model_error": own.replay.step_s / own.logged_step_s - 1,
            }
        )
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the pipeline, such as steps=15")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("-o", dest="out", default="prediction.json")
    parser.add_argument("--runs", help="keep the runs here; existing ones are not repeated")
    options = parser.parse_args(arguments)
    given = dict(item.split("=", 1) for item in options.overrides)
    keys: dict[str, Any] = {"steps": "15", "seed": "0", **given}
    runs = Path(options.runs or tempfile.mkdtemp(prefix="dataflow-prediction-"))
    rounds = [measure(runs / f"round-{n}", n % len(PRESETS), keys) for n in range(1, options.rounds + 1)]
    lines = [
        (
            "policy",
            "measured s",
            "predicted s",
            "error",
            "from",
            "to",
            "model alone",
            "measured / baseline",
            "predicted",
        )
    ]
    found = []
    for at, name in enumerate(PRESETS):
        rows = [rows[at] for rows in rounds]
        walls = [row["wall_s"] for row in rows]
        errors = sorted(row["error"] for row in rows)
        seconds = [row["predicted_s"] for row in rows]
        ratios = [row["wall_s"] / base[0]["wall_s"] for row, base in zip(rows, rounds, strict=True)]
        told_ratios = [row["predicted_s"] / base[0]["predicted_s"] for row, base in zip(rows, rounds, strict=True)]
        model = statistics.median(row["model_error"] for row in rows)
        error = statistics.median(errors)
        found.append({"policy": name, "error": error, "model_error": model, "rounds": rows})
        lines.append(
            (
                name,
                f"{statistics.median(walls):.1f}",
                f"{statistics.median(seconds):.1f}",
                f"{error:+.1%}",
                f"{errors[0]:+.1%}",
                f"{errors[-1]:+.1%}",
                f"{model:+.1%}",
                f"{statistics.median(ratios):.3f}",
                f"{statistics.median(told_ratios):.3f}",
            )
        )
    print(table(lines))
    worst = max(abs(row["error"]) for row in found)
    print(f"largest median error {worst:.1%}, bound {BOUND:.0%}")
    Path(options.out).write_text(json.dumps({"rows": found, "bound": BOUND}, indent=1))
    return worst > BOUND


if __name__ == "__main__":
    begin(main, ["steps=3", "--rounds", "1"])
