"""A training command that a signal stops while its rewards are in flight, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from dataflow.timeline import perfetto
from tests.rigs.processes import below, left

SLOW = ("steps=500", "val.every=0", "judge.latency=uniform:0.1:1", "judge.time_scale=1")
"""Overrides of a run that is far from its end after two steps."""
START_S = 150.0


def interrupt(command: Sequence[str], sign: signal.Signals, directory: Path, children: int) -> None:
    """Runs a command until its second step, stops it, and checks its end and its files.

    Args:
        command: a ``dataflow run`` with two prompts or more in flight.
        sign: SIGINT goes to the command's process group, as Ctrl-C does; others go to the command alone.
        directory: of the run.
        children: number of processes that it has at least.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        deadline = time.monotonic() + START_S
        assert process.stderr is not None
        for line in process.stderr:
            assert time.monotonic() < deadline
            if line.startswith("step 2/"):
                break
        started = below(psutil.Process(process.pid))
        assert len(started) >= children
        begin = time.monotonic()
        (os.killpg if sign == signal.SIGINT else os.kill)(process.pid, sign)
        _out, err = process.communicate(timeout=30)
        took = time.monotonic() - begin
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 128 + sign, err
    assert "interrupted: stopped after" in err
    assert f"'dataflow timeline {directory} -o {directory}.html' draws what it did" in err
    assert not left(started, timeout=5)
    # On a machine that has more to do than it has cores, as much longer.
    assert took < 5 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), f"took {took:.1f} s"
    _check_files(directory)


def _check_files(directory: Path) -> None:
    assert perfetto.read(directory / "trace.json").meta["status"] == "interrupted"
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] >= 2
    assert 0 < summary["step_s"] * summary["steps"] <= summary["wall_s"]
    counts = summary["rewards"]
    assert counts["requested"] == counts["scored"] + counts["failed"] + counts["cancelled"]
    assert counts["scored"] >= 2 * 8
    assert counts["latency_s"]["p50"] > 0
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
