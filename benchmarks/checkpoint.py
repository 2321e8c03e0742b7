"""What checkpoints cost: exposed time of saving, time to the first step after a resume, and size on disk.

    python benchmarks/checkpoint.py [--rounds 3] [--model 27m] [data.prompts=8]

Each round runs GRPO three times in this process, from the same weights and on the same samples: without checkpoints,
with one every second step, and with one that blocks the trainer until it is on the disk. Rewards come at once, so no
wait for them hides a save. The exposed time of a save is the time that it takes from the GPU's tasks:

    copy       the GPU's slot is taken; of a blocking save, this is all of it
    slowdown   how much longer tasks take beside the write than the same tasks of the run without checkpoints, compared
               with that of the tasks beside no write (so a machine that is slower for a while does not matter)

The share is of a run that saves once in ten steps. Then the run continues for one more step, and the time before that
step begins is compared with that before the first step of a new run. Medians over saves, then over rounds. Prints
tables and writes JSON; exits with 1 if the share exceeds its bound. This file is also a pipeline file: of the run that
blocks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _run import PIPELINE, begin, table
from rollout import SHAPES, model_of

from dataflow.config.loading.pipeline_file import load_pipeline_file
from dataflow.graph import Pipeline, Stage, TaskInfo
from dataflow.timeline import perfetto
from dataflow.timeline.spans import Trace, covered

BOUND = 0.01
STEPS, CYCLE, USUAL = 8, 2, 10
"""Steps of a run; those from one save to the next; those from one to the next in the run of the bound."""
VARIANTS: dict[str, tuple[Path, int]] = {
    "none": (PIPELINE, 0),
    "overlapped": (PIPELINE, CYCLE),
    "blocking": (Path(__file__).resolve(), CYCLE),
}
"""Pipeline file and ``checkpoint.every`` of each."""
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) / 100\n"

GRPO = load_pipeline_file(PIPELINE)
Config = GRPO.Config


def pipeline(config: Any) -> Pipeline:
    """Returns the usual pipeline, with one stage that holds the trainer until a checkpoint is on the disk."""
    usual: Pipeline = GRPO.pipeline(config)
    copying, writing = usual.by_name["stage_checkpoint"], usual.by_name["write_checkpoint"]
    others = [s for s in usual.stages if s.name not in ("stage_checkpoint", "keep_samples", "write_checkpoint")]
    return Pipeline([*others, blocking(copying, writing)], usual.inputs, usual.resources)


def blocking(copying: Stage, writing: Stage) -> Stage:
    """Returns one stage that does what two do."""

    assert copying.host is not None
    folder = copying.host.name

    async def save(*states: Any, fields: Any, task: TaskInfo, **services: Any) -> None:
        snapshot = await copying.fn(*states, fields=fields, task=task, **services)
        await writing.fn(snapshot, folder=folder, task=task, **services)

    return replace(copying, name="save", fn=save, writes=())


def command(*words: Any) -> float:
    """Runs a command of ``dataflow`` in this process, quietly; returns the time at which it began."""
    from dataflow.cli import main as dataflow

    begin = time.time()
    with contextlib.redirect_stdout(io.StringIO()):
        code = dataflow([*map(str, words), "--quiet"])
    if code:
        sys.exit(f"a run failed (exit code {code}).")
    return begin


def run(runs: Path, variant: str, keys: Mapping[str, Any]) -> tuple[Path, float]:
    """Runs a variant; returns its directory, and the seconds before its first task."""
    file, every = VARIANTS[variant]
    own = {**keys, "runs": runs, "name": variant, "steps": STEPS, "checkpoint.every": every}
    begin = command("run", file, *(f"{key}={value}" for key, value in own.items()))
    trace = perfetto.load(str(runs / variant))
    return runs / variant, first(trace, 1) - begin


def first(trace: Trace, step: int) -> float:
    """Returns the unix time at which the first task of a step began."""
    return float(trace.meta["started"]) + min(s.begin for s in trace.spans if s.step == step)


def steps(trace: Trace) -> float:
    """Returns the median of the seconds from one update to the next."""
    trains = trace.with_role("trains")
    ends = {s.step: s.end for s in sorted(trace.spans, key=lambda s: s.end) if s.stage in trains}
    return statistics.median(ends[step] - ends[step - 1] for step in range(2, STEPS + 1))


def copies(trace: Trace) -> float:
    """Returns the median of the seconds that a save holds the GPU's slot."""
    saves = trace.with_role("saves")
    return statistics.median(s.end - s.begin for s in trace.on("gpu") if s.stage in saves)


def slowdown(trace: Trace, plain: Trace) -> float:
    """Returns the seconds by which a write slows the tasks beside it, from those of a run without."""
    alone = {s.task: s.end - s.begin for s in plain.on("gpu")}
    writes = [(s.begin, s.end) for s in trace.spans if s.stage == "write_checkpoint"]
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for span in trace.on("gpu"):
        if span.task in alone and span.end - span.begin > 0.5:  # shorter ones vary by more than a write could add
            beside = covered(writes, span.begin, span.end) > 0.5 * (span.end - span.begin)
            ratios[beside].append((span.end - span.begin) / alone[span.task])
    if not ratios[True]:
        return 0.0
    slower = statistics.median(ratios[True]) / statistics.median(ratios[False]) - 1
    return slower * statistics.median(end - begin for begin, end in writes)


def metric(directory: Path, name: str) -> float:
    """Returns the median of a metric over the steps that have it."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(row[name] for row in rows if name in row)


def measure(runs: Path, begin: int, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the variants one after another, starting with that of a number, then one more step of the saving one."""
    names = list(VARIANTS)
    found = {name: run(runs, name, keys) for name in names[begin:] + names[:begin]}
    traces = {name: perfetto.load(str(directory)) for name, (directory, _) in found.items()}
    digests = {
        json.loads((directory / "summary.json").read_text())["weights_sha256"] for directory, _ in found.values()
    }
    if len(digests) > 1:
        sys.exit("the runs end with different weights, though saving changes nothing.")
    directory, started = found["overlapped"]
    left_out = sum(s.stage == "stage_checkpoint" and "left_out" in s.args for s in traces["overlapped"].spans)
    measured = {name: metric(directory, f"checkpoint/{name}") for name in ("write_s", "bytes")}
    weights = sum(f.stat().st_size for f in Path(keys["model.path"]).glob("*.safetensors"))
    resumed = command("resume", directory, f"steps={STEPS + 1}")
    return {
        "step_s": steps(traces["none"]),
        "copy_s": copies(traces["overlapped"]),
        "slowdown_s": slowdown(traces["overlapped"], traces["none"]),
        "blocking_s": copies(traces["blocking"]),
        "left_out": left_out,
        **measured,
        "bytes_over_weights": measured["bytes"] / weights,
        "start_s": started,
        "resume_s": first(perfetto.load(str(directory)), STEPS + 1) - resumed,
    }


def compare(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the medians over rounds of what was measured, and of ratios within one."""
    for each in rounds:
        each["overlapped_s"] = each["copy_s"] + each["slowdown_s"]
        for name in ("overlapped", "blocking"):
            each[f"{name}_share"] = each[f"{name}_s"] / (USUAL * each["step_s"])
        each["resume_over_start"] = each["resume_s"] / each["start_s"]
    row: dict[str, Any] = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    return row | {"left_out": sum(each["left_out"] for each in rounds)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="keys of the pipeline, such as data.prompts=8"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", choices=SHAPES, default="27m")
    parser.add_argument("-o", dest="out", default="checkpoint.json")
    options = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="dataflow-checkpoint-"))
    model = model_of(options.model, folder / "model")
    (folder / "reward.py").write_text(REWARD)
    keys: dict[str, Any] = {
        "seed": 0,
        "executor": "inline",
        "model.path": model,
        "engine.rollout": "hf",
        "engine.n": 4,
        "engine.max_tokens": 32,
        "data.prompts": 8,
        "data.train_size": 200,
        "custom_reward_function.path": folder / "reward.py",
        "policy": "baseline",
        "policy.order": "index",
        "trainer.micro_batch_size": 8,
        "val.every": 0,
        "checkpoint.export": "false",
        "checkpoint.keep_best": 0,
        **dict(item.split("=", 1) for item in options.overrides),
    }
    rounds = []
    for at in range(options.rounds):
        rounds.append(measure(folder / f"round-{at + 1}", at % len(VARIANTS), keys))
        print(f"round {at + 1} of {options.rounds}: {rounds[-1]}", file=sys.stderr, flush=True)
        shutil.rmtree(folder / f"round-{at + 1}", ignore_errors=True)  # over a gigabyte
    shutil.rmtree(folder, ignore_errors=True)
    row = compare(rounds)
    print(
        f"a step takes {row['step_s']:.2f} s; a save is {row['bytes'] / 1e6:.0f} MB, "
        f"{row['bytes_over_weights']:.2f} times the weights, and is whole after {row['write_s']:.1f} s"
    )
    held = row["overlapped_share"] <= BOUND and not row["left_out"]
    lines = [("checkpoint", "copy s", "slowdown s", f"share at one in {USUAL} steps", "bound", "held")]
    parts = (f"{row['copy_s']:.3f}", f"{row['slowdown_s']:.3f}")
    lines.append(("overlapped", *parts, f"{row['overlapped_share']:.2%}", f"{BOUND:.0%}", str(held)))
    lines.append(("blocking", f"{row['blocking_s']:.3f}", "", f"{row['blocking_share']:.2%}", "", ""))
    print(table(lines))
    print(
        table(
            [
                ("before the first step", "s"),
                ("of a new run", f"{row['start_s']:.1f}"),
                ("after a resume", f"{row['resume_s']:.1f}"),
                ("ratio", f"{row['resume_over_start']:.2f}"),
            ]
        )
    )
    if row["left_out"]:
        print(f"{row['left_out']} checkpoints were left out, as the disk was still busy; the steps are too short.")
    Path(options.out).write_text(json.dumps({"bound": BOUND, **row, "rounds": rounds}, indent=2) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    begin(main, ["--rounds", "1", "--model", "tiny"])
