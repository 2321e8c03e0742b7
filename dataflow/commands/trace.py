"""The trace of a run that a command names."""

from __future__ import annotations

import sys
from typing import Any


def read_trace(run: str) -> Any:
    """Returns the trace of a run, given its directory or its trace.json; says on stderr if it is cut."""
    from dataflow.timeline import perfetto

    trace = perfetto.load(run)
    if note := trace.meta.get("cut"):
        print(f"note: {run} is {note}", file=sys.stderr)
    return trace
