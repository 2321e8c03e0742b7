"""Whether a recipe learns: its held-out accuracy over the steps, for several seeds.

    python benchmarks/recipe.py [pipelines/ppo_critic.py] [seeds=3] [out=docs/ppo_critic.json] [key=value ...]

Each run trains in one process, with a judge that answers nearly at once, since how long rewards take does not matter to
what is learned. It evaluates 512 held-out problems every 5 steps. Prints a table, writes every curve as JSON and draws
them next to it. Finished runs are saved in ``out``, so that a stopped benchmark can be continued. Exits with 1 if a
seed has not learned: the mean of its last two evaluations is less than 10 points above the one before training.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import finish, start, table

LAST, GAIN = 2, 0.10
KEYS = {"executor": "inline", "engine.rollout": "hf", "reward.concurrency": 256, "judge.time_scale": 0.002}
KEYS |= {"steps": 20, "policy": "both", "val.every": 5, "checkpoint.every": 0, "checkpoint.export": "false"}


def main(arguments: list[str]) -> int:
    files = [text for text in arguments if "=" not in text]
    pipeline = Path(files[0] if files else "pipelines/ppo_critic.py")
    given = dict(text.split("=", 1) for text in arguments if "=" in text)
    seeds = int(given.pop("seeds", 3))
    out = Path(given.pop("out", f"docs/{pipeline.stem}.json"))
    curves: dict[str, dict[str, float]] = json.loads(out.read_text()) if out.is_file() else {}
    with tempfile.TemporaryDirectory() as runs:
        for seed in range(seeds):
            keys = {**KEYS, **given, "seed": seed}
            name = f"{keys['policy']}-{seed}"
            if name not in curves:
                summary = finish(start(Path(runs), name, pipeline=pipeline, **keys))
                curves[name] = summary["evaluations"]
                out.write_text(json.dumps(curves, indent=0) + "\n")
                print(f"{name}: {_after(curves[name]):.3f} in {summary['total_s']:.0f} s", file=sys.stderr, flush=True)
    rows = [("run", "before", f"after (mean of the last {LAST})")]
    rows += [(name, f"{curve['0']:.3f}", f"{_after(curve):.3f}") for name, curve in curves.items()]
    print(table(rows))
    draw(curves, out.with_suffix(".png"))
    return 0 if all(_after(curve) - curve["0"] >= GAIN for curve in curves.values()) else 1


def _after(curve: dict[str, float]) -> float:
    last = [curve[step] for step in sorted(curve, key=int) if step != "0"][-LAST:]
    return sum(last) / len(last)


def draw(curves: dict[str, dict[str, float]], path: Path) -> None:
    """Draws the accuracy over the steps, a line a run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        steps = sorted(map(int, curve))
        axes.plot(steps, [curve[str(step)] for step in steps], marker="o", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out greedy accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
