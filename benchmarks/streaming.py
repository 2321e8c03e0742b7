"""The gain of streaming with responses of very different length: measured, and predicted from a run without streaming.

    python benchmarks/streaming.py [steps=6] [engine.rollout=vllm]

An untrained model samples all tokens with about equal probability. Enough tokens end a response that the longest of a
step is more than three times as long as the mean. Rewards take about as long as a rollout. All runs are strictly
on-policy. Each round runs the four policies one after another, starting with a different one; the planner only reads
the round's ``baseline``. Prints a table of the medians and writes JSON; exits with 1 if streaming does not gain, or its
gain is not as predicted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from _run import begin, table
from prediction import measure

POLICIES = ("baseline", "baseline+stream", "mini-batch", "mini-batch+stream")
BOUND = 0.05
ENDS = 7
"""Number of tokens besides eos that end a response: with 676 in the vocabulary the mean response has about 80."""
LONGEST = 512


def babbler(directory: Path) -> tuple[Path, list[str]]:
    """Makes a model of random weights with the default model's tokenizer; returns it and its end tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from dataflow.models.tiny import tiny_model

    source = str(tiny_model())
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(source)
    config.initializer_range = 0.005
    tokenizer = AutoTokenizer.from_pretrained(source)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory, [tokenizer.convert_ids_to_tokens(token) for token in range(100, 100 + ENDS)]


def lengths(trace: Path) -> float:
    """Returns the mean over the steps of longest response / mean response, from a run's metrics."""
    lines = [json.loads(line) for line in (trace / "metrics.jsonl").read_text().splitlines()]
    return statistics.fmean(
        line["response_length/max"] / line["response_length/mean"] for line in lines if "response_length/max" in line
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="keys of the pipeline, such as steps=6")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", dest="out", default="streaming.json")
    parser.add_argument("--runs", help="keep the runs here; existing ones are not repeated")
    options = parser.parse_args(arguments)
    runs = Path(options.runs or tempfile.mkdtemp(prefix="dataflow-streaming-"))
    model, ends = babbler(runs / "model")
    keys: dict[str, Any] = {
        "steps": 6,
        "seed": 0,
        "val.every": 0,
        "model.path": model,
        "engine.max_tokens": LONGEST,
        "engine.stop": json.dumps(ends),
        "data.prompts": 8,
        "judge.latency": "uniform:1:2",
        "judge.time_scale": 1,
        "reward.concurrency": 16,
        **dict(item.split("=", 1) for item in options.overrides),
    }
    rounds = [measure(runs / f"round-{n}", n % len(POLICIES), keys, POLICIES) for n in range(1, options.rounds + 1)]
    ragged = lengths(runs / "round-1" / "baseline")
    print(f"longest / mean response of a step: {ragged:.1f}")
    held = ragged >= 3
    found = []
    lines = [("policy", "measured s", "predicted s", "gain of streaming", "predicted gain", "held")]
    for at, policy in enumerate(POLICIES):
        rows = [each[at] for each in rounds]
        row = {"policy": policy, **{k: statistics.median(r[k] for r in rows) for k in ("wall_s", "predicted_s")}}
        if policy.endswith("+stream"):
            gains = {k: [1 - r[at][k] / r[at - 1][k] for r in rounds] for k in ("wall_s", "predicted_s")}
            row |= {
                "gain": statistics.median(gains["wall_s"]),
                "predicted_gain": statistics.median(gains["predicted_s"]),
            }
            row["held"] = row["gain"] > 0 and abs(row["gain"] - row["predicted_gain"]) <= BOUND
            held = held and row["held"]
        found.append(row)
        shares = [f"{row[k]:.1%}" if k in row else "" for k in ("gain", "predicted_gain")]
        lines.append((policy, f"{row['wall_s']:.1f}", f"{row['predicted_s']:.1f}", *shares, str(row.get("held", ""))))
    print(table(lines))
    Path(options.out).write_text(json.dumps({"ragged": ragged, "bound": BOUND, "rows": found}, indent=2) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    begin(main, ["steps=2", "--rounds", "1"])
