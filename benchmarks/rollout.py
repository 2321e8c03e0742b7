"""vLLM against transformers on the same prompts with ragged responses, and a weight sync against a plain copy.

    python benchmarks/rollout.py [--rounds 3] [--models tiny 27m]

Models with random weights sample all tokens with about equal probability. Many tokens end a response, so that the
longest is several times as long as the mean. Both engines have one thread, fp32, and all samples of a round at once.
They sample different tokens, with lengths from one distribution, so tokens/s are compared. Each engine has its own
process, since vLLM changes settings of its process; the processes take turns, starting with a different engine, and two
neighbouring runs give one ratio. A sync loads all weights from this process's memory into the running engine; the plain
copy, in the same process, writes the same bytes into existing tensors. Medians. Prints tables and writes JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import ROOT, begin, table
from streaming import ENDS, LONGEST, babbler

ENGINES = ("hf", "vllm")
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {},
    "27m": {
        "hidden_size": 512,
        "intermediate_size": 1664,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
PROMPTS, N, PROMPT_LENGTH, SYNCS = 16, 8, 64, 7
CACHE = 640 << 20  # room for all samples at once


def model_of(name: str, directory: Path) -> Path:
    """Makes a model of random weights with the default model's tokenizer, of its shape or of another."""
    path, _ends = babbler(directory)
    if SHAPES[name]:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        tiny = AutoConfig.from_pretrained(path)
        same = {key: value for key, value in tiny.to_dict().items() if key != "layer_types"}  # one for each layer
        torch.manual_seed(0)
        config = type(tiny)(**{**same, **SHAPES[name]})
        AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def child(engine: str, model: str) -> dict[str, Any]:
    """Samples once to warm up and once to measure, then syncs; returns the measurements."""
    import torch
    from safetensors.torch import load_file

    from dataflow.batch import Batch
    from dataflow.engines.base import Sampling

    if engine == "vllm":
        from dataflow.engines.vllm.engine import VllmRollout

        rollout: Any = VllmRollout(model, PROMPT_LENGTH, LONGEST, threads=1, kv_cache_bytes=CACHE)
    else:
        from dataflow.engines.hf import HfRollout

        rollout = HfRollout(model, PROMPT_LENGTH, threads=1)
    dice = torch.Generator().manual_seed(1)
    sizes = torch.randint(16, PROMPT_LENGTH + 1, (PROMPTS,), generator=dice).tolist()
    prompts = Batch(
        list(range(PROMPTS)),
        {"prompt_ids": [torch.randint(200, 600, (size,), generator=dice).tolist() for size in sizes]},
    )
    stops = tuple(range(100, 100 + ENDS))
    sampling = Sampling(n=N, max_tokens=LONGEST, stop_token_ids=stops)
    weights = load_file(str(Path(model) / "model.safetensors"))

    async def work() -> dict[str, Any]:
        for _ in [sample async for sample in rollout.generate(prompts, Sampling(n=2, max_tokens=8), 1)]:
            pass
        begin = time.perf_counter()
        lengths = [len(sample.tokens) async for sample in rollout.generate(prompts, sampling, 7)]
        took = time.perf_counter() - begin
        target = {name: torch.empty_like(value) for name, value in weights.items()}
        syncs, copies = [], []
        for version in range(1, SYNCS + 2):
            begin = time.perf_counter()
            await rollout.sync(weights, version)
            syncs.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            for name, value in weights.items():
                target[name].copy_(value)
            copies.append(time.perf_counter() - begin)
        # The first of each also maps the memory pages.
        return {
            "tokens": sum(lengths),
            "seconds": took,
            "tokens_per_s": sum(lengths) / took,
            "longest_over_mean": max(lengths) * len(lengths) / sum(lengths),
            "bytes": sum(value.nbytes for value in weights.values()),
            "parameters": sum(value.numel() for value in weights.values()),
            "sync_s": statistics.median(syncs[1:]),
            "copy_s": statistics.median(copies[1:]),
        }

    try:
        return asyncio.run(work())
    finally:
        rollout.close()


def measure(engine: str, model: Path) -> dict[str, Any]:
    """Runs :func:`child` in a process of its own."""
    command = [sys.executable, __file__, "--child", engine, str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(f"{engine} failed (exit code {done.returncode}):\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(name: str, model: Path, rounds: int) -> dict[str, Any]:
    """Returns the medians of both engines, and of the rounds' ratios."""
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for at in range(rounds):
        for engine in ENGINES[:: -1 if at % 2 else 1]:
            runs[engine].append(found := measure(engine, model))
            rate = f"{found['tokens_per_s']:.0f} tokens/s"
            print(f"{name}: round {at + 1} of {rounds}, {engine}: {rate}", file=sys.stderr, flush=True)
    row: dict[str, Any] = {
        "model": name,
        "rounds": rounds,
        "parameters": runs["hf"][0]["parameters"],
        "bytes": runs["hf"][0]["bytes"],
        "longest_over_mean": min(run["longest_over_mean"] for mine in runs.values() for run in mine),
        "vllm_over_hf": statistics.median(
            vllm["tokens_per_s"] / hf["tokens_per_s"] for vllm, hf in zip(runs["vllm"], runs["hf"], strict=True)
        ),
        "runs": runs,
    }
    for engine, mine in runs.items():
        row[engine] = {key: statistics.median(run[key] for run in mine) for key in ("tokens_per_s", "sync_s")}
        row[engine]["sync_over_copy"] = statistics.median(run["sync_s"] / run["copy_s"] for run in mine)
    return row


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("-o", dest="out", default="rollout.json")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(child(*options.child)))
        return 0
    with tempfile.TemporaryDirectory(prefix="dataflow-rollout-") as home:
        rows = [compare(name, model_of(name, Path(home) / name), options.rounds) for name in options.models]
    speed = [("model", "parameters", "longest / mean", "hf tokens/s", "vllm tokens/s", "vllm / hf")]
    syncs = [("model", "MB", "hf sync ms", "/ copy", "vllm sync ms", "/ copy")]
    for row in rows:
        rates = [f"{row[engine]['tokens_per_s']:.0f}" for engine in ENGINES]
        ragged = f"{row['longest_over_mean']:.1f}"
        speed.append((row["model"], f"{row['parameters'] / 1e6:.1f}M", ragged, *rates, f"{row['vllm_over_hf']:.2f}"))
        times = [
            text
            for engine in ENGINES
            for text in (f"{row[engine]['sync_s'] * 1e3:.1f}", f"{row[engine]['sync_over_copy']:.1f}")
        ]
        syncs.append((row["model"], f"{row['bytes'] / 1e6:.0f}", *times))
    print(table(speed))
    print(table(syncs))
    Path(options.out).write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    begin(main, ["--rounds", "1", "--models", "tiny"])
