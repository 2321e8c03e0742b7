"""A run of pipelines/agent.py: the tiny model calls the calculator, and the judge scores whole conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.samples.files import file_of, read

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "agent.py")


def test_the_defaults_converse_with_the_calculator(tmp_path: Path) -> None:
    small = (
        "executor=inline",
        "engine.rollout=hf",
        "steps=2",
        "data.prompts=4",
        "trainer.mini_batches=2",
        "engine.n=4",
    )
    plain = ("val.every=0", "checkpoint.every=0", "checkpoint.export=false", "judge.time_scale=0", "samples.every=1")
    where = (f"runs={tmp_path}", "name=a", "policy=mini-batch")
    assert main(["run", PIPELINE, *small, *plain, *where, "--quiet"]) == 0
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "timing_s/step" in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert row["tools/calls"] > 0
        assert row["tools/errors"] == 0
        assert 1 < row["tools/turns"] <= 4
    samples = read(file_of(tmp_path / "a" / "samples", "step", 1))
    assert len(samples) == 16
    for sample in samples:
        extra = sample["extra_info"]
        said = (json.loads(extra) if isinstance(extra, str) else extra)["conversation"]
        turns = [turn["content"] for turn in said if turn["role"] == "assistant"]
        told = [turn for turn in said if turn["role"] == "tool"]
        assert len(turns) == sample["turns"]
        assert len(told) == sample["tool_calls"]
        assert all(turn["name"] == "calculator" and turn["content"] in sample["response"] for turn in told)
    assert {sample["score"] for sample in samples} <= {0.0, 1.0}
