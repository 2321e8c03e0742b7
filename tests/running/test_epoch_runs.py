"""Runs with ``trainer.epochs=2`` and a real trainer: the same weights however a policy splits the steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.timeline import perfetto
from tests.running.test_resume import PIPELINE, SMALL

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

STEPS = 2
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) / 100\n"


@pytest.fixture
def keys(tmp_path: Path, tiny_qwen: Path) -> tuple[str, ...]:
    (tmp_path / "reward.py").write_text(REWARD)
    plain = (
        "checkpoint.every=0",
        "checkpoint.export=false",
        "val.every=0",
        "samples.every=0",
        "trainer.lr=1e-2",
        "trainer.warmup_steps=0",
    )
    paths = (f"custom_reward_function.path={tmp_path / 'reward.py'}", f"model.path={tiny_qwen}", f"runs={tmp_path}")
    return (*(key for key in SMALL if not key.startswith("checkpoint.every")), *plain, *paths)


def test_two_epochs_of_a_split_step_give_the_weights_of_the_whole_step(keys: tuple[str, ...], tmp_path: Path) -> None:
    found = {}
    for policy, epochs in (("baseline", 2), ("mini-batch", 2)):
        name = f"{policy}-{epochs}"
        own = [f"policy={policy}", f"trainer.epochs={epochs}", f"steps={STEPS}", f"name={name}"]
        assert main(["run", PIPELINE, *keys, *own, "--quiet"]) == 0
        found[name] = json.loads((tmp_path / name / "summary.json").read_text())["weights_sha256"]
        spans = perfetto.read(tmp_path / name / "trace.json").spans
        assert sum(span.stage == "actor_update" for span in spans) == STEPS * 4 * epochs
    assert found["mini-batch-2"] == found["baseline-2"]
