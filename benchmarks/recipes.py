"""Whether each recipe learns: its held-out accuracy over the steps, for several seeds.

    python benchmarks/recipes.py [pipelines/dapo.py ...] [seeds=3] [out=docs/recipes.json] [key=value ...]

Without a file it runs all of pipelines/. Each run trains in one process, with a judge that answers nearly at once,
since how long rewards take does not matter to what is learned. It evaluates 512 held-out problems every 5 steps. Prints
a table, writes every curve as JSON and draws them next to it, a panel for each recipe. Finished runs are saved in
``out``, so that a stopped benchmark can be continued. Exits with 1 if a seed has not learned: the mean of its last two
evaluations is less than 10 points above the one before training.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import PIPELINE, ROOT, begin, explain, finish, start, table, whole

LAST, GAIN, COLUMNS = 2, 0.10, 3
KEYS = {"executor": "inline", "engine.rollout": "hf", "reward.concurrency": 256, "judge.time_scale": 0.002}
KEYS |= {"steps": 20, "policy": "both", "val.every": 5, "checkpoint.every": 0, "checkpoint.export": "false"}

Curve = dict[str, float]
"""Step -> accuracy; step 0 is before training."""


def main(arguments: list[str]) -> int:
    explain(arguments)
    given = dict(text.split("=", 1) for text in arguments if "=" in text)
    files = [Path(text) for text in arguments if "=" not in text] or sorted((ROOT / "pipelines").glob("*.py"))
    seeds = whole("seeds", given.pop("seeds", "3"))
    out = Path(given.pop("out", "docs/recipes.json"))
    curves: dict[str, dict[str, Curve]] = json.loads(out.read_text()) if out.is_file() else {}
    with tempfile.TemporaryDirectory() as runs:
        for pipeline in files:
            for seed in map(str, range(seeds)):
                if seed in curves.get(pipeline.stem, {}):
                    continue
                name = f"{pipeline.stem}-{seed}"
                keys = {**_keys(pipeline), **given, "seed": seed}
                summary = finish(start(Path(runs), name, pipeline=pipeline, **keys))
                found = curves.setdefault(pipeline.stem, {})[seed] = summary["evaluations"]
                out.write_text(json.dumps(curves, indent=0, sort_keys=True) + "\n")
                print(f"{name}: {_after(found):.3f} in {summary['total_s']:.0f} s", file=sys.stderr, flush=True)
    rows = [("recipe", "before", "after, each seed")]
    for recipe, each in sorted(curves.items()):
        before = sum(curve["0"] for curve in each.values()) / len(each)
        rows.append((recipe, f"{before:.2f}", " ".join(f"{_after(curve):.2f}" for curve in each.values())))
    print(table(rows))
    draw(curves, out.with_suffix(".png"))
    return 0 if all(_after(curve) - curve["0"] >= GAIN for each in curves.values() for curve in each.values()) else 1


def _keys(pipeline: Path) -> dict[str, Any]:
    """Returns the keys that have an effect in a pipeline: one without rewards refuses those of the judge."""
    from dataflow.config.loading.pipeline_file import load_pipeline_file

    unread = load_pipeline_file(pipeline).Config.unread
    return {key: value for key, value in KEYS.items() if key not in unread and key.partition(".")[0] not in unread}


def _after(curve: Curve) -> float:
    """Returns the mean of the last evaluations."""
    last = [curve[step] for step in sorted(curve, key=int) if step != "0"][-LAST:]
    return sum(last) / len(last)


def draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    """Draws the accuracy over the steps: a panel for each recipe, a line for each seed."""
    from matplotlib.figure import Figure

    lines = -(-len(curves) // COLUMNS)
    figure = Figure(figsize=(9, 0.5 + 2.4 * lines), layout="constrained")
    panels = iter(figure.subplots(lines, COLUMNS, sharex=True, sharey=True, squeeze=False).flat)
    for (recipe, each), panel in zip(sorted(curves.items()), panels, strict=False):
        for seed, curve in each.items():
            steps = sorted(map(int, curve))
            panel.plot(steps, [curve[str(step)] for step in steps], marker="o", markersize=3, label=f"seed {seed}")
        panel.set_title(recipe, fontsize=10)
        panel.set_ylim(0.3, 1)
        panel.grid(alpha=0.3)
    for panel in panels:  # those left over
        panel.axis("off")
    figure.supxlabel("step", fontsize=10)
    figure.supylabel("held-out greedy accuracy", fontsize=10)
    figure.axes[0].legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    begin(main, [str(PIPELINE), "seeds=1", "steps=5", "out=recipes.json"])
