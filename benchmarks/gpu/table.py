"""Writes the results of run.sh so far: table.md and table.json.

    python benchmarks/gpu/table.py WORK OUT
    python benchmarks/gpu/table.py WORK --scale

The second prints the factor on the delays of score.py, by the run without waits.
"""

from __future__ import annotations

import contextlib
import datetime
import heapq
import json
import random
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from score import LONGEST_S, SHORTEST_S

RUNS = ("alone", "baseline", "both", "lora")
FIGURES = {
    "seconds a step": "timing_s/step",
    "rollout": "timing_s/gen",
    "old log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "sync weights": "timing_s/sync_weights",
    "GPU waits, s a step": "overlap/exposed_wait_s",
    "tokens a second, prompts too": "perf/throughput",
    "MFU of updates": "perf/mfu/actor",
    "trainer's allocated memory, GiB": "perf/max_memory_allocated_gb",  # verl's name, but it divides by 1024 ** 3
    "gradient norm": "actor/grad_norm",
    "log-perplexity, rollout - trainer": "rollout_corr/log_ppl_abs_diff",
    "KL, rollout to trainer": "rollout_corr/kl",
}


def scale(work: Path) -> float:
    """Returns the factor on the delays with which a step's rewards take as long as its other work."""
    _first, step = _steps(work / "runs" / "alone")
    slots, drawn = [0.0] * int(step["reward/limit"]), random.Random(0)
    for _ in range(int(step["reward/requested"])):
        heapq.heapreplace(slots, slots[0] + drawn.uniform(SHORTEST_S, LONGEST_S))
    return step["timing_s/step"] / max(slots)


def figures(work: Path) -> dict[str, Any]:
    """Returns what was measured so far."""
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "device": _device(), "versions": _versions()}
    found["parts"] = [line.split("\t") for line in (work / "parts.tsv").read_text().splitlines()]
    found["runs"] = {}
    for name in RUNS:
        with contextlib.suppress(FileNotFoundError):
            # The first step loads kernels and is longer than any other.
            steps = _steps(work / "runs" / name)[1:]
            row = {label: _median(steps, key) for label, key in FIGURES.items()}
            used = [int(word) for word in _read(work / f"{name}.memory").split() if word.isdecimal()]
            row["GPU memory in use at most, GiB"] = max(used) / 1024 if used else None
            summary = _parsed(_read(work / "runs" / name / "summary.json")) or {}
            row["seconds of training, with the first step"] = summary.get("wall_s")
            found["runs"][name] = {label: value for label, value in row.items() if value is not None}
    checks = [line for path in work.glob("dry-*.out") for line in _parsed(_read(path)) or []]
    found["estimate"] = next((line["message"] for line in checks if line["what"] == "GPU memory"), None)
    plan = _parsed(_read(work / "plan.out"))
    rows = plan["policies"] if plan else []
    found["predicted"] = {row["policy"]: row["total_s"] for row in rows if row["policy"] in found["runs"]}
    return found


def markdown(found: dict[str, Any]) -> str:
    """Returns the figures as a page."""
    runs = list(found["runs"])
    lines = [f"{found['date']}, {found['device']}; {found['versions']}", ""]
    if runs:
        lines += [f"| | {' | '.join(runs)} |", f"|---|{'---|' * len(runs)}"]
        labels = dict.fromkeys(label for row in found["runs"].values() for label in row)
        for label in labels:
            each = (found["runs"][name].get(label) for name in runs)
            lines.append(f"| {label} | {' | '.join('' if value is None else f'{value:.4g}' for value in each)} |")
        lines.append("")
    if found["estimate"]:
        lines += [f"Estimated before by dry=true, for all runs but lora: {found['estimate']}", ""]
    for policy, seconds in found["predicted"].items():
        took = found["runs"][policy].get("seconds of training, with the first step")
        error = f", {seconds / took - 1:+.1%} of the measured {took:.1f} s" if took else ""
        lines.append(f"Predicted from the baseline: {policy} {seconds:.1f} s{error}.")
    lines += ["", "| part | exit code | seconds |", "|---|---|---|"]
    lines += [f"| {' | '.join(part)} |" for part in found["parts"]]
    return "\n".join(lines) + "\n"


def _steps(run: Path) -> list[dict[str, float]]:
    """Returns the rows of a run's steps, without a last one that the run was stopped in."""
    rows = [_parsed(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row and "timing_s/step" in row]


def _median(rows: list[dict[str, float]], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return statistics.median(values) if values else None


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _parsed(text: str) -> Any:
    """Returns what a JSON text is; None if there is none, or a part was stopped while it wrote it."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text)
    return None


def _device() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "no GPU: a rehearsal, whose figures say nothing"


def _versions() -> str:
    found = []
    for name in ("torch", "transformers", "verl", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


if __name__ == "__main__":
    if sys.argv[2] == "--scale":
        print(f"{scale(Path(sys.argv[1])):.4f}")
    else:
        result = figures(Path(sys.argv[1]))
        for name, text in (("table.json", json.dumps(result, indent=1) + "\n"), ("table.md", markdown(result))):
            Path(sys.argv[2], f"{name}.part").write_text(text)
            Path(sys.argv[2], f"{name}.part").replace(Path(sys.argv[2], name))
