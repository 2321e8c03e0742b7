"""The trace's file during a run: whole after each task, kept after a SIGKILL, and never the end of a run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow.cli import main
from dataflow.errors import RunError
from dataflow.timeline import perfetto
from dataflow.timeline.perfetto import TraceWriter
from dataflow.timeline.spans import Level, Mark, Span, Trace
from tests.timeline.traces.trace_format import check

ROOT = Path(__file__).parents[2]


def span(step: int = 1, **args: object) -> Span:
    return Span("rollout", step, 0, 1, "gpu", float(step), step + 0.5, dict(args))


def start(path: Path, **meta: object) -> tuple[Trace, TraceWriter]:
    trace = Trace(meta={"status": "running", **meta})
    writer = TraceWriter(path, trace.meta)
    trace.sink = writer.add
    return trace, writer


def test_the_file_holds_each_task_once_it_is_added(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace, writer = start(path, policy="both")
    assert perfetto.read(path).meta["status"] == "cut off"
    for step in range(1, 5):
        trace.add(span(step), Mark("reward", "reward", step, step + 0.2), Level("limit", step, 8.0))
        back = perfetto.read(path)
        assert (back.spans, back.marks, back.levels) == (trace.spans, trace.marks, trace.levels)
        assert back.meta["cut"].endswith(f"its last task was rollout[{step}]")
    trace.meta["status"] = "finished"
    writer.close(trace)
    assert perfetto.read(path) == trace
    check(json.loads(path.read_text()))
    size = path.stat().st_size
    writer.close(trace)
    assert path.stat().st_size == size


def test_facts_that_json_lacks_are_converted(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace, writer = start(path)
    trace.add(
        span(1, loss=float("nan"), most=float("inf"), n=np.int64(3), x=np.float32(0.5), at=np.array([1.0, np.nan])),
        span(2, where=path, numbers={1: 2, None: 3}),
        Span("rollout", 3, 0, 1, "gpu", -0.2, 1.0),  # began before the run, by another machine's clock
    )
    writer.close(trace)
    check(json.loads(path.read_text()))
    back = perfetto.read(path)
    assert back.spans[0].args == {"loss": None, "most": None, "n": 3, "x": 0.5, "at": [1.0, None]}
    assert back.spans[1].args["where"] == str(path)
    assert back.spans[2] == trace.spans[2]


def test_a_disk_that_fills_up_while_a_run_goes_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk: list[str] = []

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            if disk:
                raise OSError(28, "No space left on device")
            return super().write(data)

        def close(self) -> None:
            super().close()
            if disk:
                raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode, **_options: File(path, mode))
        trace, writer = start(tmp_path / "trace.json")
    trace.add(span(1))
    disk.append("full")
    with pytest.raises(RunError, match="No space left on device; make room") as caught:
        trace.add(span(2))
    assert "\n" not in str(caught.value)
    assert [s.step for s in trace.spans] == [1, 2]
    trace.add(span(3))
    writer.close(trace)
    assert [s.step for s in perfetto.read(tmp_path / "trace.json").spans] == [1]


KILLED = """
import asyncio, os, sys, time
from dataflow.system import clock
from dataflow.executors.inline import InlineExecutor
from dataflow.graph import Latest, Pipeline, stage
from dataflow.policy import SchedulingPolicy, expand
from dataflow.runner import Runner
from dataflow.timeline.spans import Trace
from dataflow.timeline.perfetto import TraceWriter

@stage(writes="responses", on="gpu")
def rollout(prompts, *, task):
    time.sleep(0.005)
    now = clock.now()
    task.mark("reward", now - 0.001, now, group=task.step)
    return prompts

@stage(writes="actor", on="gpu")
def actor_update(responses, actor: Latest):
    time.sleep(0.005)
    return responses

graph = expand(Pipeline([rollout, actor_update], inputs=["prompts"]), SchedulingPolicy(), 100_000, 1)
trace = Trace(meta={"status": "running", "policy": "baseline"})
writer = TraceWriter(sys.argv[1], trace.meta)

def add(span, *inside):
    writer.add(span, *inside)
    print(span.task, len(trace.spans), flush=True)

trace.sink = add
asyncio.run(Runner(graph, InlineExecutor(), inputs={"prompts": int}, trace=trace).run())
"""


@pytest.mark.timeout(60)
def test_a_killed_run_leaves_all_that_was_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("actor_update[20]"):
                break
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().splitlines()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    told = [line, *rest][-1].split()
    back = perfetto.read(path)
    # All tasks that the run printed, and at most the one that it was about to print.
    assert len(back.spans) - int(told[1]) in (0, 1)
    assert [s.step for s in back.spans if s.stage == "rollout"] == [m.args["step"] for m in back.marks]
    assert main(["timeline", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "(cut off)" in shown.out
    assert f"its last task was {back.spans[-1].task}" in shown.err
