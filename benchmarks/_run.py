"""Runs a pipeline in a process of its own, for the benchmarks: one summary for one list of overrides."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

ROOT = Path(__file__).resolve().parents[1]
PIPELINE = ROOT / "pipelines" / "gsm8k_grpo.py"


_SMOKE_KEYS: dict[str, Any] = {}
_TINY = {"executor": "inline", "engine.rollout": "hf", "engine.n": 2, "engine.max_tokens": 24, "data.prompts": 4}
_TINY |= {"trainer.mini_batches": 2, "data.val_size": 8, "checkpoint.every": 0, "checkpoint.export": "false"}


def begin(main: Callable[[list[str]], int], smoke: Sequence[str]) -> NoReturn:
    """Runs a benchmark with the arguments of the command line, and exits with 1 if a bound is missed.

    With ``--smoke`` it runs with these arguments first, and its runs are tiny and in this process: that takes seconds
    and shows that the benchmark works. Its figures say nothing then, so no bound counts.
    """
    arguments = [word for word in sys.argv[1:] if word != "--smoke"]
    if len(arguments) == len(sys.argv) - 1:
        sys.exit(main(arguments))
    _SMOKE_KEYS.update(_TINY)
    main([*smoke, *arguments])
    print("smoke: it works; no bound was judged.")
    sys.exit(0)


def start(runs: Path, name: str, pipeline: Path = PIPELINE, **overrides: Any) -> subprocess.Popen[str]:
    """Starts a run of a pipeline; ``trainer__lr=1e-4`` stands for ``trainer.lr=1e-4``."""
    named = {key.replace("__", "."): value for key, value in overrides.items()} | _SMOKE_KEYS
    keys = [f"{key}={_text(value)}" for key, value in named.items()]
    if _SMOKE_KEYS:
        import dataflow

        summary = dataflow.run(pipeline, f"runs={runs}", f"name={name}", *keys).summary
        return cast("subprocess.Popen[str]", _Ended(json.dumps(dict(summary))))
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


@dataclass(frozen=True)
class _Ended:
    """What :func:`finish` reads of the process of a run, for one that was run here."""

    out: str
    returncode: int = 0

    def communicate(self) -> tuple[str, str]:
        return self.out, ""


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
