"""Writes the results of run.sh so far: table.md and table.json.

    python benchmarks/gpu/table.py WORK OUT
    python benchmarks/gpu/table.py WORK --judge

The second prints judge.time_scale, by the run without waits.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

RUNS = ("alone", "baseline", "both", "lora")
MEAN_LATENCY_S = 20.5  # of judge.latency=uniform:1:40
FIGURES = {
    "seconds a step": "timing_s/step",
    "rollout": "timing_s/gen",
    "old log-probs": "timing_s/old_log_prob",
    "update": "timing_s/update_actor",
    "gather weights": "timing_s/gather_weights",
    "sync weights": "timing_s/sync_weights",
    "GPU waits, s a step": "overlap/exposed_wait_s",
    "tokens a second": "perf/throughput",
    "MFU of updates": "perf/mfu/actor",
    "trainer's allocated memory, GB": "perf/max_memory_allocated_gb",
    "log-perplexity, rollout - trainer": "rollout_corr/log_ppl_abs_diff",
    "KL, rollout to trainer": "rollout_corr/kl",
}


def judge(work: Path) -> float:
    """Returns the factor on the judge's delays with which a step's rewards take as long as its other work."""
    step = _steps(work / "runs" / "alone")[-1]
    waves = step["reward/requested"] / step["reward/limit"]
    return step["timing_s/step"] / (waves * MEAN_LATENCY_S)


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
            summary = json.loads(_read(work / "runs" / name / "summary.json") or "{}")
            row["seconds of training"] = summary.get("wall_s")
            found["runs"][name] = {label: value for label, value in row.items() if value is not None}
    checks = [line for path in work.glob("dry-*.out") for line in _json(path) or []]
    found["estimate"] = next((line["message"] for line in checks if line["what"] == "GPU memory"), None)
    plan = _json(work / "plan.out")
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
        lines += [f"Estimated before (dry=true): {found['estimate']}", ""]
    for policy, seconds in found["predicted"].items():
        took = found["runs"][policy].get("seconds of training")
        error = f", {seconds / took - 1:+.1%} of the measured {took:.1f} s" if took else ""
        lines.append(f"Predicted from the baseline: {policy} {seconds:.1f} s{error}.")
    lines += ["", "| part | exit code | seconds |", "|---|---|---|"]
    lines += [f"| {' | '.join(part)} |" for part in found["parts"]]
    return "\n".join(lines) + "\n"


def _steps(run: Path) -> list[dict[str, float]]:
    """Returns the rows of a run's steps."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "timing_s/step" in row]


def _median(rows: list[dict[str, float]], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return statistics.median(values) if values else None


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _json(path: Path) -> Any:
    """Returns a file's JSON; None if it is not there, or a part was stopped while it wrote it."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(_read(path))
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
    if sys.argv[2] == "--judge":
        print(f"{judge(Path(sys.argv[1])):.4f}")
    else:
        result = figures(Path(sys.argv[1]))
        Path(sys.argv[2], "table.json").write_text(json.dumps(result, indent=1) + "\n")
        Path(sys.argv[2], "table.md").write_text(markdown(result))
