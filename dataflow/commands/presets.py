"""`dataflow compare PIPELINE.py`: runs a pipeline under each preset, one run after another."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dataflow.config.loading.saved import load
from dataflow.errors import ConfigError, DataflowError, UserError
from dataflow.policy import PRESETS
from dataflow.system.children import command
from dataflow.system.stopping import stopping


def run_all(pipeline: str, overrides: Sequence[str]) -> list[str]:
    """Runs the pipeline under each preset, one process after another, and returns the runs' directories.

    Raises:
        ConfigError: ``policy`` or ``name`` is among the overrides.
        DataflowError: a run failed; its own command has printed the reason.
    """
    given = [text for text in overrides if text.split("=")[0] in ("policy", "name")]
    if given:
        raise ConfigError(f"'{given[0]}': compare sets policy and name itself; leave it out.")
    _module, config = load(pipeline, list(overrides))
    number = 1
    while any((Path(config.runs) / f"compare-{number}-{name}").exists() for name in PRESETS):
        number += 1
    runs = []
    for name in PRESETS:
        directory = Path(config.runs) / f"compare-{number}-{name}"
        print(f"{name}:", file=sys.stderr)
        run = command("dataflow", "run", pipeline, *overrides, f"policy={name}", f"name={directory.name}")
        # The child prints its own error; stdout is for the table.
        code = _ended(subprocess.Popen(run, stdout=sys.stderr))
        if code:
            raise (UserError if code == 2 else DataflowError)(
                f"compare: the run under '{name}' ended with exit code {code}."
            )
        runs.append(str(directory))
    return runs


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Waits for a run; if it is stopped, gives it the same time to close as its own command does."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.send_signal(stopping.received or signal.SIGINT)
        process.wait()
        raise
