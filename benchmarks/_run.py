"""Runs a pipeline in a process of its own, for the benchmarks: one summary for one list of overrides."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
PIPELINE = ROOT / "pipelines" / "gsm8k_grpo.py"


def start(runs: Path, name: str, pipeline: Path = PIPELINE, **overrides: Any) -> subprocess.Popen[str]:
    """Starts a run of a pipeline; ``trainer__lr=1e-4`` stands for ``trainer.lr=1e-4``."""
    keys = [f"{key.replace('__', '.')}={_text(value)}" for key, value in overrides.items()]
    command = [
        sys.executable,
        "-m",
        "dataflow",
        "run",
        str(pipeline.resolve()),
        f"runs={runs}",
        f"name={name}",
        *keys,
    ]
    command += ["--json", "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits for a run and returns its summary; if the run failed, ends the benchmark with its error."""
    out, errors = process.communicate()
    if process.returncode:
        sys.exit(f"a run failed (exit code {process.returncode}):\n{errors}")
    return dict(json.loads(out))


def refuse(sentence: str) -> NoReturn:
    """Ends a benchmark whose arguments are wrong, as argparse does: a sentence on stderr, and exit code 2."""
    print(sentence, file=sys.stderr)
    sys.exit(2)


def explain(arguments: Sequence[str]) -> None:
    """Prints what the benchmark is and takes, and ends it, if it was asked for with ``--help``."""
    if {"-h", "--help"} & set(arguments):
        print((sys.modules["__main__"].__doc__ or "").strip())
        sys.exit(0)


def parsed(arguments: Sequence[str], defaults: Mapping[str, str], use: str) -> dict[str, str]:
    """Returns ``key=value`` arguments over their defaults; ends the benchmark if one is no such pair or unknown."""
    explain(arguments)
    given = dict(defaults)
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals or key not in given:
            refuse(f"unknown: {text}; {use}.")
        given[key] = value
    return given


def whole(name: str, text: str, least: int = 1, why: str = "") -> int:
    """Returns a whole number that was given as text; ends the benchmark if it is none, or too small (``why``)."""
    if not text.isdecimal() or int(text) < least:
        refuse(f"{name}={text}: give a whole number of {least} or more{f', {why}' if why else ''}.")
    return int(text)


def _text(value: Any) -> str:
    return "null" if value is None else str(value)


def table(rows: list[tuple[str, ...]]) -> str:
    """Returns rows as aligned text; the first is the heading."""
    from dataflow.timeline.text import table as aligned

    return str(aligned(rows))


def classifier(directory: Path) -> str:
    """Saves a small model with a classification head; returns its path."""
    import shutil

    import torch
    from transformers import AutoConfig, Qwen2ForSequenceClassification

    from dataflow.models.tiny import tiny_model

    source = Path(tiny_model())
    config = AutoConfig.from_pretrained(source, num_labels=1)
    torch.manual_seed(0)
    Qwen2ForSequenceClassification(config).save_pretrained(directory)
    for file in source.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, directory)
    return str(directory)
