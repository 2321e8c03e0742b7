"""A whole run on a GPU: skipped without one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dataflow.cli import main
from tests.rigs.cuda import why_not

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=f"trains on CUDA: {why_not()}"),
]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")


@pytest.mark.parametrize("policy", ["baseline", "both"])
def test_workers_on_a_gpu_train_and_sync(policy: str, tmp_path: Path, tiny_qwen: Path) -> None:
    keys = ["steps=3", "data.prompts=8", "engine.n=2", "engine.max_tokens=8", "data.max_prompt_length=200"]
    keys += [f"model.path={tiny_qwen}", f"runs={tmp_path}", "name=cuda", "data.val_size=8", "judge.latency=0.1"]
    assert main(["run", PIPELINE, *keys, "ray.gpus_per_worker=1", f"policy={policy}", "--quiet"]) == 0
    summary = json.loads((tmp_path / "cuda" / "summary.json").read_text())
    assert summary["status"] == "finished"
    lines = [json.loads(line) for line in (tmp_path / "cuda" / "metrics.jsonl").read_text().splitlines()]
    losses = [m["actor/pg_loss"] for m in lines if "actor/pg_loss" in m]
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
