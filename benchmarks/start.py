"""How long a run takes from its command to its first task, and which process spends the CPU time of it.

    python benchmarks/start.py [--engines hf vllm] [--rounds 3] [--trl PYTHON] [key=value ...]

Each round starts the same training in TRL's GRPOTrainer, up to its first step, if ``PYTHON`` (by default this one) has
trl, and then the default run on a terminal, with warm caches. Times are also given as ratios to TRL's in the same
round, since the machine may be slower for a while. CPU seconds, which a loaded machine changes little, are those of
each process at the first task. Prints tables and writes JSON; exits with 1 if a median ratio exceeds its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _processes import Follower, name_of
from _run import PIPELINE, ROOT, begin, table

BOUNDS = {"hf": 2.0, "vllm": 4.5}
"""Largest median ratio of the first task's time to that of TRL's first step, by engine.

TRL draws with transformers; two processes import vLLM."""
LIGHT_S = 0.3
"""CPU seconds of `import dataflow`."""
TRL = """
import sys
sys.modules["vllm"] = None  # which it would import although it does not use it
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

class First(TrainerCallback):
    def on_step_begin(self, *_, **__):
        sys.exit()

rows = [{"prompt": f"Tom has {n} apples and buys {n % 7} more. How many has he?"} for n in range(256)]
config = GRPOConfig(
    output_dir=sys.argv[2], max_steps=1, per_device_train_batch_size=64, gradient_accumulation_steps=4,
    num_generations=8, max_completion_length=48, use_cpu=True, report_to=[], save_strategy="no", bf16=False,
)
reward = lambda completions, **_: [0.0] * len(completions)
GRPOTrainer(
    model=sys.argv[1], reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows), callbacks=[First()]
).train()
"""
FIRST = "the first task starts"
"""What the run prints then."""


def timed(*command: str) -> tuple[float, float]:
    """Returns the seconds and the CPU seconds of a process."""
    before, began = os.times(), time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    seconds, after = time.monotonic() - began, os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return seconds, spent


class Cpu(Follower):
    """Follows the CPU seconds of a process and of all below it, by name."""

    def __init__(self, root: int) -> None:
        self._seen: dict[tuple[int, float], tuple[str, float]] = {}
        super().__init__(root, every_s=0.1)

    def look(self, processes: Sequence[psutil.Process]) -> None:
        for process in processes:
            try:
                times, words = process.cpu_times(), process.cmdline()
                key = (process.pid, process.create_time())
            except psutil.Error:
                continue
            self._seen[key] = (name_of(words), times.user + times.system)

    def take(self) -> dict[str, float]:
        """Returns the seconds by process, largest first, and stops following."""
        self.close()
        self.look([self._root, *self._root.children(recursive=True)])
        found: Counter[str] = Counter()
        for name, seconds in self._seen.values():
            found[name] += seconds
        return dict(found.most_common())


def started(engine: str, runs: Path, keys: list[str]) -> dict[str, Any]:
    """Starts the default run; returns the seconds to the first output, to the first task and of the end."""
    ours, terminal = pty.openpty()
    command = [sys.executable, "-m", "dataflow", "run", str(PIPELINE), f"runs={runs}", "steps=1", "val.every=0"]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, f"engine.rollout={engine}", *keys], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=terminal
    )
    os.close(terminal)
    cpu, found, text = Cpu(process.pid), {}, ""
    while True:
        try:
            text += os.read(ours, 1 << 16).decode(errors="replace")
        except OSError:  # its end
            break
        now = time.monotonic() - began
        found.setdefault("output_s", now)
        if FIRST in text and "task_s" not in found:
            found |= {"task_s": now, "cpu": cpu.take()}
        if "step 1/1" in text or "1/1" in text:
            found.setdefault("step_s", now)
    os.close(ours)
    if process.wait() or "task_s" not in found:
        sys.exit(f"the run failed:\n{text}")
    found["end_s"] = time.monotonic() - began - found.get("step_s", found["task_s"])
    found["cpu_s"] = sum(found["cpu"].values())
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of the run")
    parser.add_argument("--engines", nargs="+", default=["hf"], choices=sorted(BOUNDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON", help="an interpreter that has trl")
    parser.add_argument("-o", dest="out", type=Path, default=Path("start.json"))
    options = parser.parse_intermixed_args(arguments)
    from dataflow.models.tiny import tiny_model

    has_trl = subprocess.run([options.trl, "-c", "import trl"], capture_output=True).returncode == 0
    rounds: dict[str, list[dict[str, Any]]] = {engine: [] for engine in options.engines}
    with tempfile.TemporaryDirectory(prefix="dataflow-start-") as runs:
        for _round in range(options.rounds):
            for engine in options.engines:
                found = started(engine, Path(runs), options.keys)
                if has_trl:
                    seconds, spent = timed(options.trl, "-c", TRL, str(tiny_model()), runs)
                    ratios = {"ratio": found["task_s"] / seconds, "cpu_ratio": found["cpu_s"] / spent}
                    found |= {"trl_s": seconds, "trl_cpu_s": spent, **ratios}
                rounds[engine].append(found)
    if not has_trl:
        print(f"{options.trl} has no trl, so there is nothing to compare this with; give --trl PYTHON.")
    options.out.write_text(json.dumps(rounds, indent=1) + "\n")
    return shown(rounds)


def shown(rounds: dict[str, list[dict[str, Any]]]) -> int:
    """Prints the tables; returns the exit code."""
    wanted = ("output_s", "task_s", "trl_s", "ratio", "cpu_s", "trl_cpu_s", "cpu_ratio", "end_s")
    names = [name for name in wanted if all(name in row for found in rounds.values() for row in found)]
    rows: list[tuple[str, ...]] = [("engine", *names)]
    python = (sys.executable, "-c")
    light = min(timed(*python, "import dataflow")[1] - timed(*python, "")[1] for _ in range(3))
    held = light <= LIGHT_S
    print(f"import dataflow: {light:.2f} CPU s (bound {LIGHT_S:g})")
    for engine, found in rounds.items():
        medians = {name: statistics.median(row[name] for row in found) for name in names}
        rows.append((engine, *(f"{medians[name]:.2f}" for name in names)))
        if medians.get("ratio", 0.0) > BOUNDS[engine]:
            held = False
            print(f"{engine}: {medians['ratio']:.2f} exceeds the bound {BOUNDS[engine]:.2f}", file=sys.stderr)
    print(table(rows))
    for engine, found in rounds.items():
        least = min(found, key=lambda row: float(row["cpu_s"]))
        print(f"\n{engine}: CPU s of each process at the first task")
        print(table([("process", "CPU s"), *((name, f"{s:.1f}") for name, s in least["cpu"].items() if s >= 0.05)]))
    return 0 if held else 1


if __name__ == "__main__":
    begin(main, ["--rounds", "1"])
