"""Runs of pipelines/ppo_critic.py over two epochs: a split and a resume change no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.cli import main

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "ppo_critic.py")
STEPS = 4
KEYS = (
    "engine.rollout=hf", "executor=inline", "data.prompts=8", "engine.n=2", "engine.max_tokens=8",
    "data.max_prompt_length=200", "data.train_size=200", "val.every=0", "samples.every=0", "checkpoint.export=false",
    "policy.order=index", "trainer.epochs=2", "trainer.lr=1e-2", "reward.tries=1", f"steps={STEPS}", "--quiet",
)  # fmt: skip
# It raises after as many requests as the file says, when there is a checkpoint.
REWARD = """
import asyncio
from pathlib import Path

HERE = Path(__file__).parent

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    if (HERE / "left.txt").exists():
        with (HERE / "asked.txt").open("a") as log:
            log.write(".")
        if (HERE / "asked.txt").stat().st_size > int((HERE / "left.txt").read_text()):
            while not list(HERE.glob("runs/stopped/checkpoints/step_*")):
                await asyncio.sleep(0.05)
            raise RuntimeError("the judge is out of order")
    return len(solution_str) / 100
"""


def test_a_split_and_resumed_run_ends_with_the_weights_of_actor_and_critic(tmp_path: Path, tiny_qwen: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    runs = tmp_path / "runs"
    keys = (*KEYS, f"custom_reward_function.path={tmp_path / 'reward.py'}", f"model.path={tiny_qwen}", f"runs={runs}")
    assert main(["run", PIPELINE, *keys, "name=whole", "policy=baseline", "checkpoint.every=0"]) == 0
    (tmp_path / "left.txt").write_text(str(3 * 16 + 4))  # of three steps, and some
    assert main(["run", PIPELINE, *keys, "name=stopped", "policy=mini-batch", "checkpoint.every=2"]) == 1
    (tmp_path / "left.txt").unlink()
    assert main(["resume", str(runs / "stopped"), "--quiet"]) == 0
    digests = set()
    for name in ("whole", "stopped"):
        summary = json.loads((runs / name / "summary.json").read_text())
        digests.add((summary["weights_sha256"], summary["critic_weights_sha256"]))
        rows = [json.loads(line) for line in (runs / name / "metrics.jsonl").read_text().splitlines()]
        steps = [row for row in rows if "timing_s/step" in row]
        assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
        assert min(row["actor/grad_norm"] for row in steps) > 0, "else the weights are equal whatever is lost"
        for row in steps:
            assert {"critic/vf_loss", "critic/values/mean", "timing_s/values", "timing_s/update_critic"} <= set(row)
    assert len(digests) == 1
    (pair,) = digests
    assert pair[0] != pair[1], "of actor and critic"
