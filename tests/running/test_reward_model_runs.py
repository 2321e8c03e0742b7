"""Runs that serve their reward models on vLLM: they train, no death of a server costs a reward, and nothing is left."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.cli import main
from dataflow.samples.files import file_of, read
from tests.rigs.processes import below, command, left
from tests.rigs.reward_models import save_reward_model, scores, servers

pytestmark = [pytest.mark.heavy, pytest.mark.vllm, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
GRPO, TWO = (str(ROOT / "pipelines" / f"{name}.py") for name in ("gsm8k_grpo", "two_judges"))
STEPS = 4
SMALL = (
    "engine.rollout=hf", f"steps={STEPS}", "data.prompts=4", "engine.n=2", "engine.max_tokens=8",
    "data.max_prompt_length=200", "data.train_size=200", "trainer.mini_batches=2", "val.every=0",
    "checkpoint.export=false", "samples.every=1", "name=a", "--quiet",
)  # fmt: skip
SAMPLES = STEPS * 4 * 2


@pytest.fixture(scope="module")
def rm(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tiny_qwen, tmp_path_factory.mktemp("reward") / "rm")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    started = [each for each in below() if any(word in " ".join(command(each)) for word in ("vllm", "api_server"))]
    assert left(started, timeout=5) == []


def check_scores(directory: Path, key: str, rm: Path) -> None:
    """Compares the scores of a run with those that transformers computes of the same conversations."""
    found = [sample for step in range(1, STEPS + 1) for sample in read(file_of(directory / "samples", "step", step))]
    chats = [
        [{"role": "user", "content": sample["prompt"]}, {"role": "assistant", "content": sample["response"]}]
        for sample in found
    ]
    assert [sample[key] for sample in found] == pytest.approx(scores(rm, chats), abs=1e-3)
    assert len({sample[key] for sample in found}) > SAMPLES // 2


def test_the_death_of_all_servers_behind_the_router_costs_no_reward(
    tmp_path: Path, tiny_qwen: Path, rm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, killed = threading.Event(), list[psutil.Process]()

    def kill_after_the_first_step() -> None:
        metrics = tmp_path / "a" / "metrics.jsonl"
        while not ended.wait(0.02):
            if metrics.exists() and metrics.stat().st_size:
                killed.extend(servers("rm"))
                for server in killed:
                    server.kill()
                return

    killer = threading.Thread(target=kill_after_the_first_step)
    killer.start()
    keys = [f"model.path={tiny_qwen}", f"runs={tmp_path}", f"reward.models.rm.path={rm}", "reward.models.rm.replicas=2"]
    try:
        assert main(["run", GRPO, *SMALL, *keys, "executor=ray"]) == 0
    finally:
        ended.set()
        killer.join()
    assert len(killed) == 2
    assert capsys.readouterr().err.count("ended (killed, or out of memory): restart") == 2
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    found = summary["rewards"]
    assert (found["requested"], found["scored"], found["failed"]) == (SAMPLES, SAMPLES, 0)
    assert summary["reward_models"] == {"rm": {"servers": 2, "restarts": 2}}
    check_scores(tmp_path / "a", "score", rm)


def test_a_run_trains_on_a_classifier_and_a_judge_that_it_serves(tmp_path: Path, tiny_qwen: Path, rm: Path) -> None:
    chat = save_reward_model(tiny_qwen, tmp_path / "chat", "chat")
    prompt: dict[str, Any] = {"max_tokens_reply": 16, "temperature": 1.0}
    prompt["options"] = {"structured_outputs": {"regex": "Score: (0|1|0\\.[1-9])"}}
    models = {
        "grader": {"path": str(chat), "kind": "chat", "max_num_seqs": 8, "prompt": prompt},
        "rm": {"path": str(rm), "max_num_seqs": 8},
    }
    keys = [f"model.path={tiny_qwen}", f"runs={tmp_path}", f"reward.models={json.dumps(models)}", "executor=inline"]
    keys += ["reward.model=grader", "rule.model=rm", "weights.length=0"]
    assert main(["run", TWO, *SMALL, *keys]) == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    for name, agent in summary["rewards"]["agents"].items():
        assert (agent["requested"], agent["scored"], agent["failed"]) == (SAMPLES, SAMPLES, 0), name
    check_scores(tmp_path / "a", "rule_score", rm)
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["actor/grad_norm"] > 0 for row in rows if "actor/grad_norm" in row] == [True] * STEPS
