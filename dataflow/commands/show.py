"""`dataflow show`: the stages of a pipeline, its unrolled graph, and the critical path."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from dataflow.commands.trace import read_trace
from dataflow.config.loading.pipeline_file import pipeline_of
from dataflow.config.loading.saved import load
from dataflow.errors import counted
from dataflow.policy import expand


def show(options: argparse.Namespace) -> int:
    """Prints or draws what the command asks for; returns its exit code."""
    unroll = any(text.startswith("steps=") for text in options.overrides)
    if options.out:
        from dataflow.drawing.graph_picture import check_out

        check_out(Path(options.out), tasks=unroll)
    module, config = load(options.pipeline, options.overrides)
    pipeline = pipeline_of(module, config)
    policy = config.policy.resolve(config.optimizer_steps)
    steps = config.steps
    graph = expand(pipeline, policy, steps, config.optimizer_steps, groups=config.step_groups)
    seconds = _seconds_of(options.costs) if options.costs else None
    if options.out:
        from dataflow.drawing.graph_picture import draw_graph

        draw_graph(pipeline, graph if unroll else None, Path(options.out), seconds)
    if options.json:
        window = graph.window(1, steps if unroll else 1)
        nodes = [{"task": str(task), **facts} for task, facts in window.nodes(data=True)]
        print(json.dumps({"tasks": nodes, "edges": [[str(a), str(b)] for a, b in window.edges]}, indent=1))
    elif options.out:
        print(options.out)
    else:
        print(pipeline.explain())
        if unroll:
            facts = f"{counted(policy.split, 'part')}, max_staleness {policy.max_staleness}, {counted(steps, 'step')}"
            print(f"\n{config.policy.preset}, {facts}:\n")
            print(graph.explain(1, steps))
        print(f"\n{_critical(pipeline, graph if unroll else None, seconds)}")
    return 0


def _seconds_of(run: str) -> dict[str, float]:
    """Returns how long the tasks of each stage took in one step of a run, together."""
    from dataflow.timeline.causes import summary
    from dataflow.timeline.spans import Trace

    trace = read_trace(run)
    whole = set(trace.whole_steps)
    # Of a step that was interrupted there are only some tasks.
    ended = Trace([s for s in trace.spans if s.step in whole], meta=trace.meta) if whole else trace
    return {name: of["total_s"] / max(1, len(whole)) for name, of in summary(ended)["stages"].items()}


def _critical(pipeline: Any, graph: Any, seconds: dict[str, float] | None) -> str:
    from dataflow.drawing.graph_picture import critical_path, stages

    path = critical_path(pipeline, stages(pipeline) if graph is None else graph.window(), seconds)
    basis = (
        "each stage counts the same; --costs RUN takes the times of a run" if seconds is None else "times of the run"
    )
    return f"critical path ({basis}): {' -> '.join(map(str, path))}"
