"""Runs of a pipeline that takes no model, in processes that are killed at a moment that does not depend on speed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import dataflow
from tests.rigs.checkpoints import Child

TOY = Path(__file__).parents[1] / "faults" / "rig" / "toy_run.py"


class ToyPlace:
    """A directory with one run of the toy pipeline, and the logs of its requests.

    Args:
        directory: of all files.
        policy: of the run.
        steps: of the run.
    """

    def __init__(self, directory: Path, policy: str, steps: int) -> None:
        self.directory = directory
        self.run = directory / "runs" / "a"
        self.policy = policy
        self.steps = steps

    def work(self, **checkpoint: Any) -> None:
        """Begins the run, or resumes it."""
        os.environ["TOY_LOGS"] = str(self.directory)
        dataflow.run(
            TOY, runs=str(self.directory / "runs"), name="a", resume="auto", steps=self.steps, groups=4, mini_batches=2,
            policy={"preset": self.policy, "order": "index"}, checkpoint={"every": 2, **checkpoint},
        )  # fmt: skip

    def until(self, operation: int | None) -> int:
        """Works in a process of its own, which is killed before its file operation of that number; returns its exit
        code. Operations elsewhere, such as those of imports, do not count.
        """

        def work() -> None:
            if operation is not None:
                kill_before(operation, str(self.directory))
            self.work()

        return Child(work).wait()

    def log(self, name: str) -> Counter[str]:
        """Returns how often each line is in a log."""
        file = self.directory / f"{name}.jsonl"
        return Counter(map(json.loads, file.read_text().splitlines())) if file.exists() else Counter()

    def paid(self) -> set[str]:
        """Returns the requests whose answers the ledger holds, as step.group.sample."""
        ledger = self.run / "rewards.sqlite"
        if not ledger.exists():
            return set()
        with closing(sqlite3.connect(ledger)) as file:
            if not file.execute("SELECT 1 FROM sqlite_master WHERE name = 'request'").fetchall():
                return set()
            found = file.execute("SELECT step, grp, sample FROM request WHERE score IS NOT NULL").fetchall()
        return {".".join(map(str, row)) for row in found}

    def facts(self) -> dict[str, Any]:
        """Returns what must be the same as in a run that is not killed."""
        summary = json.loads((self.run / "summary.json").read_text())
        rows = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return {
            "status": summary["status"],
            "weights": summary["weights_sha256"],
            "steps": [row["step"] for row in rows if "timing_s/step" in row],
            "requested": summary["rewards"]["requested"],
        }


def kill_before(operation: int, directory: str) -> None:
    """Kills this process before its n-th operation on a file in a directory."""
    left = operation

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event != "open" and not event.startswith(("os.", "shutil.", "sqlite3.")):
            return
        if any(isinstance(a, str | Path) and str(a).startswith(directory) for a in arguments):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
