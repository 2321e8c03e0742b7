"""A run that serves its reward model on vLLM is trained on the scores that transformers computes of its samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.samples.files import file_of, read
from tests.rigs.processes import below, command, left
from tests.rigs.reward_models import save_reward_model, scores

pytestmark = [pytest.mark.heavy, pytest.mark.vllm, pytest.mark.timeout(300)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")
SMALL = (
    "engine.rollout=hf", "executor=inline", "steps=1", "data.prompts=4", "engine.n=2", "engine.max_tokens=8",
    "data.max_prompt_length=200", "data.train_size=200", "trainer.mini_batches=2", "val.every=0", "checkpoint.every=0",
    "checkpoint.export=false", "samples.every=1", "name=a", "--quiet",
)  # fmt: skip


def test_scores_are_those_of_transformers_and_no_server_is_left(tmp_path: Path, tiny_qwen: Path) -> None:
    rm = save_reward_model(tiny_qwen, tmp_path / "rm")
    keys = (f"model.path={tiny_qwen}", f"runs={tmp_path}", f"reward.models.rm.path={rm}")
    assert main(["run", PIPELINE, *SMALL, *keys]) == 0
    started = [each for each in below() if any(word in " ".join(command(each)) for word in ("vllm", "api_server"))]
    assert left(started, timeout=5) == []
    found = read(file_of(tmp_path / "a" / "samples", "step", 1))
    chats = [
        [{"role": "user", "content": sample["prompt"]}, {"role": "assistant", "content": sample["response"]}]
        for sample in found
    ]
    assert [sample["score"] for sample in found] == pytest.approx(scores(rm, chats), abs=1e-3)
    assert len({sample["score"] for sample in found}) > 4
