"""Held-out accuracy of the four policies over several seeds, with and without rollout correction.

    python benchmarks/accuracy.py [seeds=5] [steps=60] [jobs=2] [policies=both,...] [out=docs/accuracy.json]

Each run trains the default pipeline with a nearly immediate judge, since the effect of a policy on learning depends
only on the weights and groups that it trains with, not on how long the rewards take. It evaluates 512 held-out problems
every 3 steps. Accuracy at step N is the mean of the last three evaluations up to N. Prints a table with means and
standard errors, writes every curve as JSON and draws them next to it. Finished runs are saved in ``out``, so that a
stopped benchmark can be continued.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import begin, finish, parsed, start, table, whole

POLICIES = ("baseline", "mini-batch", "off-policy", "both")
EVERY, LAST = 3, 3


def settings(seeds: int) -> Iterator[tuple[str, str | None, int]]:
    """Yields (policy, rollout correction, seed); on-policy samples have nothing to correct."""
    for seed in range(seeds):
        for policy in POLICIES:
            for correction in (None, "token") if policy in ("off-policy", "both") else (None,):
                yield policy, correction, seed


def main(arguments: list[str]) -> int:
    defaults = {"seeds": "5", "steps": "60", "jobs": "2", "policies": ",".join(POLICIES)}
    defaults["out"] = "docs/accuracy.json"
    given = parsed(arguments, defaults, "use seeds=N steps=N jobs=N policies=A,B out=FILE")
    seeds, steps, jobs = (whole(name, given[name]) for name in ("seeds", "steps", "jobs"))
    out = Path(given["out"])
    curves: dict[str, dict[str, float]] = json.loads(out.read_text()) if out.is_file() else {}
    policies = given["policies"].split(",")
    wanted = [(key(*one), one) for one in settings(seeds) if one[0] in policies]
    todo = [one for name, one in wanted if str(steps) not in curves.get(name, {})]
    with tempfile.TemporaryDirectory() as runs:
        running: list[tuple[str, Any]] = []
        while todo or running:
            while todo and len(running) < jobs:
                policy, correction, seed = todo.pop(0)
                keys = {"policy": policy, "seed": seed, "steps": steps, "algorithm__rollout_is": correction}
                # All of a step's rewards are in flight at once, so that the groups of a mini-batch are random.
                keys |= {"executor": "inline", "reward__concurrency": 256, "judge__time_scale": 0.002}
                keys["val__every"] = EVERY
                running.append(
                    (key(policy, correction, seed), start(Path(runs), key(policy, correction, seed), **keys))
                )
            name, process = running.pop(0)
            curves[name] = finish(process)["evaluations"]
            out.write_text(json.dumps(curves, indent=0))
            print(f"{name}: {at(curves[name], steps):.3f}  ({len(todo) + len(running)} to go)", file=sys.stderr)
    print(report(curves, seeds, sorted({min(30, steps), steps})))
    draw(curves, seeds, out.with_suffix(".png"))
    return 0


def key(policy: str, correction: str | None, seed: int) -> str:
    return f"{policy}{'+' + correction if correction else ''}-{seed}"


def at(curve: dict[str, float], step: int) -> float:
    """Returns the mean of the last evaluations up to a step, without the one before training."""
    upto = [value for when, value in sorted(curve.items(), key=lambda item: int(item[0])) if 0 < int(when) <= step]
    return sum(upto[-LAST:]) / len(upto[-LAST:])


def report(curves: dict[str, dict[str, float]], seeds: int, steps: list[int]) -> str:
    """Returns the table: mean +- standard error over the seeds, and each seed's value."""
    rows: list[tuple[str, ...]] = [
        ("policy", "correction", "before", *(f"at step {n}" for n in steps), "seeds at the end")
    ]
    for policy in POLICIES:
        for correction in (None, "token"):
            names = [key(policy, correction, seed) for seed in range(seeds)]
            found = [curves[name] for name in names if name in curves]
            if not found:
                continue
            cells = [_mean([at(curve, n) for curve in found]) for n in steps]
            each = " ".join(f"{at(curve, steps[-1]):.3f}" for curve in found)
            rows.append((policy, correction or "none", _mean([curve["0"] for curve in found]), *cells, each))
    return table(rows)


def draw(curves: dict[str, dict[str, float]], seeds: int, path: Path) -> None:
    """Draws each policy's accuracy over the steps: a line per seed, the mean over the seeds in bold."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots(1, len(POLICIES), sharey=True)
    for axis, policy in zip(axes, POLICIES, strict=True):
        for correction, colour in ((None, "tab:blue"), ("token", "tab:orange")):
            found = [curves[n] for n in (key(policy, correction, seed) for seed in range(seeds)) if n in curves]
            if not found:
                continue
            steps = sorted(map(int, found[0]))
            for curve in found:
                axis.plot(steps, [curve[str(s)] for s in steps], color=colour, alpha=0.25, linewidth=0.8)
            mean = [sum(curve[str(s)] for curve in found) / len(found) for s in steps]
            label = f"mean of {len(found)} seeds" + (", rollout correction" if correction else "")
            axis.plot(steps, mean, color=colour, linewidth=2, label=label)
        axis.set_title(policy)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("held-out greedy accuracy")
    figure.savefig(path, dpi=110)


def _mean(values: list[float]) -> str:
    mean = sum(values) / len(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return f"{mean:.3f} +- {math.sqrt(variance / len(values)):.3f}"


if __name__ == "__main__":
    begin(main, ["seeds=1", "steps=3", "policies=both", "out=accuracy.json"])
