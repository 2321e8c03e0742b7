"""`dataflow compare`: several runs as one table, one page or one picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from dataflow.commands.trace import read_trace
from dataflow.errors import ConfigError
from dataflow.policy import PRESETS, STREAM
from dataflow.timeline import files
from dataflow.timeline.compare import cells, compared, note, summary_of
from dataflow.timeline.spans import Trace
from dataflow.timeline.text import table


def compare(runs: Sequence[str], out: str | None, as_json: bool) -> str:
    """Returns the table of several runs in the order of the policies, compared with the first of them.

    Args:
        runs: their directories.
        out: a picture or page to write.
        as_json: whether to return the table as JSON.

    Raises:
        UserError: a run does not exist or is given twice, or the file cannot be drawn.
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
