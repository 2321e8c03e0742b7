"""Golden timelines: the Gantt chart of a virtual run and the order of its GPU tasks, compared with a file."""

from __future__ import annotations

import os
from pathlib import Path

from dataflow.graph import TaskGraph
from dataflow.testing import check_trace
from dataflow.timeline.text import gantt
from tests.rigs.costs import SteadyCosts
from tests.rigs.scheduling import simulate

GOLDEN = Path(__file__).parent.parent / "golden"


def check_golden(graph: TaskGraph, costs: SteadyCosts, name: str, policy: str) -> None:
    """Asserts that a virtual run looks as in ``golden/NAME.txt``; ``UPDATE_GOLDEN=1`` writes the file."""
    trace, _ = simulate(graph, costs)
    check_trace(trace, graph)
    trace.meta["policy"] = policy
    drawn = gantt(trace, 120) + "\ngpu: " + " ".join(s.task for s in trace.on("gpu")) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(drawn)
    assert drawn == path.read_text(), f"look at the difference in {path}, then run again with UPDATE_GOLDEN=1"
