"""`dataflow compare`: several runs as one table, page or picture; given a pipeline, a run under each preset."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dataflow.commands.trace import read_trace
from dataflow.config.loading.saved import load
from dataflow.errors import ConfigError, DataflowError, UserError
from dataflow.policy import PRESETS, STREAM
from dataflow.system.children import command
from dataflow.system.stopping import stopping
from dataflow.timeline import files
from dataflow.timeline.compare import cells, compared, note, summary_of
from dataflow.timeline.spans import Trace
from dataflow.timeline.text import table


def compare(runs: Sequence[str], out: str | None, as_json: bool) -> str:
    """Returns the table of runs, given by directory, in the order of the policies, compared with the first of them.

    ``out`` is a picture or page to write.
    """
    files.check(out)
    places = [Path(run).resolve() for run in runs]
    if (twice := next((run for i, run in enumerate(runs) if places[i] in places[:i]), None)) is not None:
        raise ConfigError(f"run '{twice}' is given twice; give different runs.")
    read = sorted(((str(run), read_trace(run)) for run in runs), key=lambda each: _place(each[1]))
    policies = [str(trace.meta.get("policy") or Path(run).name) for run, trace in read]
    names = [(p, f"{p} ({Path(run).name})", f"{p} ({run})") for p, (run, _trace) in zip(policies, read, strict=True)]
    kind = next(kind for kind in zip(*names, strict=True) if len({*kind}) == len(read))  # all by what tells them apart
    given = {name: run for name, (run, _trace) in zip(kind, read, strict=True)}
    traces = {name: trace for name, (_run, trace) in zip(kind, read, strict=True)}
    facts = {name: summary_of(run) for name, run in given.items()}
    rows = [{"run": given[row["policy"]], **row} for row in compared(traces, facts)]
    if out:
        files.draw(traces, out, facts=facts)
    if as_json:
        return json.dumps(rows, indent=1)
    said = note(rows)
    return table(cells(rows)) + (f"\n\n{said}" if said else "") + files.written(out)


def _place(trace: Trace) -> int:
    """Returns the place of a run's policy in the order of the presets; others come last."""
    name = str(trace.meta.get("policy", "")).removesuffix(STREAM)
    return PRESETS.index(name) if name in PRESETS else len(PRESETS)


def run_all(pipeline: str, overrides: Sequence[str]) -> list[str]:
    """Runs the pipeline under each preset, one process after another, and returns the runs' directories.

    The overrides may not set ``policy`` or ``name``. If a run fails, its own command has printed the reason.
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
        process = subprocess.Popen(run, stdout=sys.stderr)
        try:
            code = process.wait()
        except KeyboardInterrupt:  # it gets the same time to close as its own command
            process.send_signal(stopping.received or signal.SIGINT)
            process.wait()
            raise
        if code:
            raise (UserError if code == 2 else DataflowError)(
                f"compare: the run under '{name}' ended with exit code {code}."
            )
        runs.append(str(directory))
    return runs
