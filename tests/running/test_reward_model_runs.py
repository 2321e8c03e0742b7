"""Runs that serve their reward models: they train, no death of a server costs a reward, and nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.cli import main
from dataflow.samples.files import file_of, read
from tests.rigs.processes import below, command, left
from tests.rigs.reward_models import Harm, save_reward_model, scores, servers

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
GRPO, TWO = (str(ROOT / "pipelines" / f"{name}.py") for name in ("gsm8k_grpo", "two_judges"))
SMALL = (
    "engine.rollout=hf",
    "executor=inline",
    "steps=3",
    "data.prompts=4",
    "engine.n=2",
    "engine.max_tokens=8",
    "data.max_prompt_length=200",
    "data.train_size=200",
    "trainer.mini_batches=2",
    "val.every=0",
    "checkpoint.export=false",
    "samples.every=1",
)
SAMPLES = 3 * 4 * 2
ASKS = """
import aiohttp

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    chat = [*extra_info["raw_prompt"], {"role": "assistant", "content": solution_str}]
    body = {"model": "rm", "messages": chat, "use_activation": False}
    async with aiohttp.ClientSession() as session:
        async with session.post(f"http://{reward_router_address}/classify", json=body) as reply:
            return (await reply.json())["data"][0]["probs"][0]
"""


@pytest.fixture(scope="module")
def rm(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tiny_qwen, tmp_path_factory.mktemp("reward") / "rm")


@pytest.fixture(scope="module")
def chat(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tiny_qwen, tmp_path_factory.mktemp("reward") / "chat", "chat")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(below())
    yield
    assert left(set(below()) - before, timeout=5) == []


def keys(model: Path, runs: Path, *more: str) -> list[str]:
    given = {key.partition("=")[0] for key in more}
    return [
        *(key for key in SMALL if key.partition("=")[0] not in given),
        f"model.path={model}",
        f"runs={runs}",
        "name=a",
        "--quiet",
        *more,
    ]


def hf(rm: Path, *more: str, replicas: int = 2) -> list[str]:
    options = [f"path={rm}", "engine=hf", f"replicas={replicas}", *more]
    return [f"reward.models.rm.{option}" for option in options]


def counts(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "summary.json").read_text())["rewards"]
    return found


def samples(directory: Path) -> list[Any]:
    return [sample for step in (1, 2, 3) for sample in read(file_of(directory / "samples", "step", step))]


def check_scores(found: list[Any], key: str, rm: Path) -> None:
    """Compares the scores of a run with those that transformers computes of the same conversations."""
    chats = [
        [{"role": "user", "content": sample["prompt"]}, {"role": "assistant", "content": sample["response"]}]
        for sample in found
    ]
    assert [sample[key] for sample in found] == pytest.approx(scores(rm, chats), abs=1e-3)
    assert len({sample[key] for sample in found}) > SAMPLES // 2


def kill(there: list[psutil.Process]) -> None:
    for server in there:
        server.kill()


@pytest.mark.vllm
def test_a_run_trains_on_a_classifier_and_a_judge_that_it_serves(
    tmp_path: Path, tiny_qwen: Path, rm: Path, chat: Path
) -> None:
    prompt = {"max_tokens_reply": 16, "options": {"structured_outputs": {"regex": "Score: (0|1|0\\.[1-9])"}}}
    models = {
        "grader": {"path": str(chat), "kind": "chat", "max_num_seqs": 8, "prompt": {**prompt, "temperature": 1.0}},
        "rm": {"path": str(rm), "max_num_seqs": 8},
    }
    given = (f"reward.models={json.dumps(models)}", "reward.model=grader", "rule.model=rm", "weights.length=0")
    assert main(["run", TWO, *keys(tiny_qwen, tmp_path, *given)]) == 0
    for name, agent in counts(tmp_path / "a")["agents"].items():
        assert (agent["requested"], agent["scored"], agent["failed"]) == (SAMPLES, SAMPLES, 0), name
    found = samples(tmp_path / "a")
    assert len(found) == SAMPLES
    check_scores(found, "rule_score", rm)
    assert all(0 <= sample["judge_score"] <= 1 for sample in found)
    rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [row["actor/grad_norm"] > 0 for row in rows if "actor/grad_norm" in row] == [True] * 3


class Other(BaseHTTPRequestHandler):
    """A server with another model, which nobody asks for a score."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "other"}]}')

    def log_message(self, *_: object) -> None: ...


def test_a_function_asks_all_models_at_one_address(tmp_path: Path, tiny_qwen: Path, rm: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    function = f"rule.custom_reward_function.path={tmp_path / 'asks.py'}"
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        more = ("reward.model=rm", function, "weights.length=0", f"reward.models.other.url={url}")
        code = main(["run", TWO, *keys(tiny_qwen, tmp_path, *hf(rm, replicas=1), *more)])
        other.shutdown()
    assert code == 0
    found = samples(tmp_path / "a")
    assert [sample["rule_score"] for sample in found] == pytest.approx([sample["judge_score"] for sample in found])
    check_scores(found, "judge_score", rm)


def test_the_death_of_all_servers_in_flight_costs_no_reward(
    tmp_path: Path, tiny_qwen: Path, rm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    harm = Harm("rm", kill)
    harm.arm(monkeypatch)
    assert main(["run", GRPO, *keys(tiny_qwen, tmp_path, *hf(rm))]) == 0
    assert harm.done.is_set()
    assert capsys.readouterr().err.count("ended (killed, or out of memory): restart") == 2
    found = counts(tmp_path / "a")
    assert (found["requested"], found["scored"], found["failed"]) == (SAMPLES, SAMPLES, 0)
    check_scores(samples(tmp_path / "a"), "score", rm)


def test_a_server_that_hangs_is_left_out(
    tmp_path: Path, tiny_qwen: Path, rm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go_on(there: list[psutil.Process]) -> None:
        there[0].send_signal(signal.SIGCONT)

    harm = Harm("rm", go_on)
    harm.arm(monkeypatch)
    assert main(["run", GRPO, *keys(tiny_qwen, tmp_path, *hf(rm, "timeout=2"))]) == 0
    assert harm.done.is_set()
    found = counts(tmp_path / "a")
    assert (found["requested"], found["scored"], found["failed"]) == (SAMPLES, SAMPLES, 0)
    check_scores(samples(tmp_path / "a"), "score", rm)


def test_servers_that_may_not_restart_end_the_run_with_a_sentence(
    tmp_path: Path, tiny_qwen: Path, rm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    harm = Harm("rm", kill)
    harm.arm(monkeypatch)
    assert main(["run", GRPO, *keys(tiny_qwen, tmp_path, *hf(rm, "restarts=0", replicas=1))]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("RunError")]
    assert len(said) == 1
    assert "reward model 'rm': server 0 ended (killed, or out of memory), after 0 restarts" in said[0]
    assert str(tmp_path / "a" / "servers" / "rm-0.log") in said[0]
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["status"] == "failed"


def test_a_server_that_does_not_start_ends_the_run_with_a_sentence(
    tmp_path: Path, tiny_qwen: Path, rm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = save_reward_model(tiny_qwen, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "model_type": "no_such_type"}))
    assert main(["run", GRPO, *keys(tiny_qwen, tmp_path, *hf(broken, replicas=1))]) == 1
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("RunError")]
    assert len(said) == 1
    assert "reward model 'rm': server 0 did not start (" in said[0]
    assert "no_such_type" in said[0]


def test_servers_end_within_seconds_of_the_death_of_the_run(tmp_path: Path, tiny_qwen: Path, rm: Path) -> None:
    words = [sys.executable, "-m", "dataflow", "run", GRPO]
    words += keys(tiny_qwen, tmp_path, "steps=100000", *hf(rm, replicas=1))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, cwd=ROOT, env=environment, start_new_session=True) as process:
        parent = psutil.Process(process.pid)
        metrics = tmp_path / "a" / "metrics.jsonl"
        end = time.monotonic() + 200
        while not (metrics.exists() and metrics.stat().st_size):
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.05)
        started = below(parent)
        assert len(servers("rm", parent)) == 1
        run = next(child for child in parent.children() if "guard" not in " ".join(command(child)))
        # The parent cannot end what it is killed before; the guards of the servers can.
        for each in (parent, run):
            each.kill()
        assert left(started, timeout=5) == []
