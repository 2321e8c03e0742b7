"""How much memory a run takes, process by process, beside the same training in TRL's GRPOTrainer.

    python benchmarks/memory.py [--engine hf] [--trl PYTHON] [key=value ...]

Runs three steps of the default pipeline, and as many of TRL with the same model and the same number of samples, if
``PYTHON`` (by default this one) has trl. Memory is the proportional set size: a page that n processes share counts a
n-th in each. It is read twice a second; the moment with the largest sum counts. Prints tables and writes JSON; exits
with 1 if a run takes more than twice the memory of TRL.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _processes import Follower, name_of
from _run import PIPELINE, ROOT, begin, table

BOUND = 2.0
"""Largest ratio of a run's memory to that of TRL."""
STEPS, PROMPTS, SAMPLES, TOKENS = 3, 32, 8, 48
TRL = """
import sys
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

model, steps, prompts, samples, tokens, out = sys.argv[1], *map(int, sys.argv[2:6]), sys.argv[6]
rows = [{"prompt": f"Tom has {n} apples and buys {n % 7} more. How many has he?"} for n in range(steps * prompts)]
config = GRPOConfig(
    output_dir=out, max_steps=steps, per_device_train_batch_size=prompts * samples // 4, gradient_accumulation_steps=4,
    num_generations=samples, max_completion_length=tokens, use_cpu=True, report_to=[], save_strategy="no", bf16=False,
    logging_steps=1,
)
reward = lambda completions, **_: [float(len(each) % 2) for each in completions]
GRPOTrainer(model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows)).train()
"""


class Memory(Follower):
    """Follows the memory of a process and of all below it.

    Attributes:
        most: MB by process when their sum was largest.
        processes: their number then.
    """

    def __init__(self, root: int) -> None:
        self.most: Counter[str] = Counter()
        self.processes = 0
        super().__init__(root, every_s=0.5)

    def look(self, processes: Sequence[psutil.Process]) -> None:
        found: Counter[str] = Counter()
        number = 0
        for process in processes:
            try:
                found[name_of(process.cmdline())] += process.memory_full_info().pss // 2**20
                number += 1
            except psutil.Error:
                continue
        if found.total() > self.most.total():
            self.most, self.processes = found, number


def followed(command: list[str]) -> dict[str, Any]:
    """Runs a command; returns its largest memory, by process."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
        memory = Memory(process.pid)
        code = process.wait()
        memory.close()
        if code:
            errors.seek(0)
            sys.exit(f"{' '.join(command[:4])} failed (exit code {code}):\n{errors.read()[-4000:]}")
    by_process = dict(memory.most.most_common())
    return {"mb": memory.most.total(), "processes": memory.processes, "by_process": by_process}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", metavar="key=value", help="of the run")
    parser.add_argument("--engine", default="hf", choices=("hf", "vllm"))
    parser.add_argument("--trl", default=sys.executable, metavar="PYTHON", help="an interpreter that has trl")
    parser.add_argument("-o", dest="out", type=Path, default=Path("memory.json"))
    options = parser.parse_intermixed_args(arguments)
    from dataflow.models.tiny import tiny_model

    sizes = {"data.prompts": PROMPTS, "engine.n": SAMPLES, "engine.max_tokens": TOKENS, "steps": STEPS}
    with tempfile.TemporaryDirectory() as place:
        keys = [f"{key}={value}" for key, value in sizes.items()]
        run = [sys.executable, "-m", "dataflow", "run", str(PIPELINE), f"runs={place}", "val.every=0"]
        found = {"dataflow": followed([*run, f"engine.rollout={options.engine}", *keys, *options.keys])}
        if subprocess.run([options.trl, "-c", "import trl"], capture_output=True).returncode == 0:
            numbers = [str(n) for n in (STEPS, PROMPTS, SAMPLES, TOKENS)]
            found["trl"] = followed([options.trl, "-c", TRL, str(tiny_model()), *numbers, place])
    for name, of in found.items():
        print(f"{name}: {of['mb']:,} MB in {of['processes']} processes")
        print(table([("process", "MB"), *((each, f"{mb:,}") for each, mb in of["by_process"].items())]), end="\n\n")
    options.out.write_text(json.dumps({**found, "bound": BOUND}, indent=1) + "\n")
    if "trl" not in found:
        print(f"{options.trl} has no trl, so there is nothing to compare this with; give --trl PYTHON.")
        return 0
    ratio = found["dataflow"]["mb"] / found["trl"]["mb"]
    print(f"dataflow / TRL: {ratio:.2f} (bound: {BOUND:g})")
    return 0 if ratio <= BOUND else 1


if __name__ == "__main__":
    begin(main, [])
