"""A run that samples from servers elsewhere: one dies on the way, the run is resumed with another."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dataflow.cli import main
from tests.rigs.inference_servers import FakeServer, serving

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(180)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")
SMALL = (
    "engine.rollout=http", "executor=inline", "policy=both+stream", "steps=2", "data.prompts=4", "engine.n=2",
    "engine.max_tokens=8", "data.max_prompt_length=200", "data.train_size=200", "trainer.mini_batches=2", "val.every=0",
    "checkpoint.every=1", "checkpoint.export=false", "judge.latency=0", "judge.time_scale=0", "samples.every=1",
)  # fmt: skip


def fake(model: Path) -> FakeServer:
    """Returns a fake server of a model."""
    from transformers import AutoTokenizer

    config = json.loads((model / "config.json").read_text())
    return FakeServer(config["vocab_size"], [AutoTokenizer.from_pretrained(model).eos_token_id], str(model))


def test_a_run_over_servers(tmp_path: Path, tiny_qwen: Path) -> None:
    servers = [fake(tiny_qwen) for _ in range(3)]
    servers[0].fault = lambda number: "die" if number == 6 else ""
    where = (f"runs={tmp_path}", "name=a", f"model.path={tiny_qwen}", "--quiet")
    with serving(*servers):
        urls = [server.url for server in servers]
        assert main(["run", PIPELINE, *SMALL, f"engine.urls=[{urls[0]},{urls[1]}]", *where]) == 0
        summary = json.loads((tmp_path / "a" / "summary.json").read_text())
        assert (summary["status"], summary["steps"]) == ("finished", 2)
        assert not (tmp_path / "a" / "weights").exists()
        assert main(["resume", str(tmp_path / "a"), "steps=3", f"engine.urls={urls[2]}", "--quiet"]) == 0
        assert servers[2].label.startswith("version-3")
        rows = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
        assert {row["step"]: row["staleness/max"] for row in rows if "staleness/max" in row} == {1: 0, 2: 1, 3: 0}
