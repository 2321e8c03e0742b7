"""Runs of a pipeline that takes no model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import dataflow

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
