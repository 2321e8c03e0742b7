"""Runs whose scores float32 cannot tell apart or hold, and whose updates verl skips: nothing of it is silent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from dataflow.cli import main
from tests.running.test_resume import PIPELINE, SMALL

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

KIND = "custom_reward_function.reward_kwargs.kind"
Run: TypeAlias = Callable[..., tuple[int, list[dict[str, Any]], list[str]]]
REWARD = """
import torch

def compute_score(data_source, solution_str, ground_truth, extra_info, kind):
    odd = len(solution_str) % 2
    return {
        "noise": 0.1 + 0.2 if odd else 0.3,
        "far": 1e8 + odd,
        "lowest": 1.0 if odd else torch.finfo(torch.float32).min,
        "length": len(solution_str) / 100,
    }[kind]
"""


@pytest.fixture
def run(tmp_path: Path, tiny_qwen: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """Makes one step; returns its exit code, rows of metrics and messages."""

    def run(name: str, *more: str) -> tuple[int, list[dict[str, Any]], list[str]]:
        (tmp_path / "reward.py").write_text(REWARD)
        keys = (
            *(key for key in SMALL if not key.startswith("checkpoint.every")),
            *("checkpoint.every=0", "checkpoint.export=false", "val.every=0", "samples.every=0", "policy=baseline"),
            *(f"custom_reward_function.path={tmp_path / 'reward.py'}", f"model.path={tiny_qwen}", f"runs={tmp_path}"),
        )
        capfd.readouterr()
        code = main(["run", PIPELINE, *keys, "steps=1", f"name={name}", *more, "--quiet"])
        file = tmp_path / name / "metrics.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return code, rows, capfd.readouterr().err.splitlines()

    return run


@pytest.mark.parametrize("kind", ["noise", "far"])
def test_scores_that_float32_cannot_tell_apart_are_filtered_and_told(kind: str, run: Run) -> None:
    code, (row,), said = run("x", f"{KIND}={kind}", "algorithm.filter_groups.enable=true", "engine.n=4")
    assert code == 0
    assert row["reward/filtered_groups"] == row["reward/equal_groups"] == 8, "all of them"
    assert row["reward/indistinct"] > 0
    assert row["actor/skipped_updates"] == 0
    words = f"step 1: reward/indistinct is {row['reward/indistinct']:g}: scores that float32"
    assert sum(words in line for line in said) == 1


def test_a_score_whose_advantages_cannot_be_finite_ends_the_run_with_its_sample(run: Run) -> None:
    code, _rows, said = run("x", f"{KIND}=lowest")
    assert code == 1
    words = "of step 1: 'compute_score' returned -3.40282e+38, outside of ±1e+15"
    assert any(words in line for line in said)


def test_skipped_updates_are_counted_and_end_the_run_after_a_number_in_a_row(run: Run) -> None:
    """The first update throws the weights so far away that no gradient is finite after it."""
    far = (f"{KIND}=length", "trainer.lr=1e9", "trainer.weight_decay=1e9", "trainer.warmup_steps=0")
    code, rows, said = run("counted", *far)
    assert code == 0, said
    assert rows[0]["actor/skipped_updates"] == 3, "of four"
    assert rows[0]["actor/grad_norm"] > 0, "of the one that was taken"
    assert sum("step 1: actor/skipped_updates is 3: updates that changed" in line for line in said) == 1
    code, rows, said = run("ended", *far, "trainer.max_skipped=2")
    assert (code, rows) == (1, [])
    words = "the last 2 updates were all skipped (trainer.max_skipped=2), so that the actor learns nothing: their"
    assert any(words in line for line in said)
