"""A run whose reward model is awake only between rollout and update, on real servers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import psutil
import pytest

from dataflow.cli import main
from dataflow.timeline import perfetto
from dataflow.timeline.text import gantt

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

PIPELINE = str(Path(__file__).parents[2] / "pipelines" / "gsm8k_grpo.py")
SMALL = (
    "engine.rollout=hf", "steps=2", "data.prompts=4", "engine.n=2", "engine.max_tokens=8", "data.max_prompt_length=200",
    "trainer.mini_batches=2", "val.every=2", "data.val_size=4", "checkpoint.export=false",
    "executor=inline", "policy=both", "data.train_size=200",
)  # fmt: skip
MODEL = {"engine": "hf", "placement": "colocated", "replicas": 2, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def classifier(tiny_qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import AutoConfig, Qwen2ForSequenceClassification

    path = tmp_path_factory.mktemp("models") / "rm"
    with torch.random.fork_rng():
        torch.manual_seed(7)
        Qwen2ForSequenceClassification(AutoConfig.from_pretrained(tiny_qwen, num_labels=1)).save_pretrained(path)
    for file in tiny_qwen.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, path)
    return path


def test_a_colocated_model_scores_while_nothing_else_runs(
    classifier: Path, tiny_qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = json.dumps({"rm": {**MODEL, "path": str(classifier)}})
    where = (f"runs={tmp_path}", "name=a", f"model.path={tiny_qwen}", "--quiet")
    assert main(["run", PIPELINE, *SMALL, f"reward.models={models}", *where]) == 0
    directory = tmp_path / "a"
    trace = perfetto.load(str(directory))
    spans = {(s.stage, s.step): s for s in trace.spans}
    assert sum(stage == "wake_rewards" for stage, _ in spans) == 2
    assert ("val_wake_rewards", 2) in spans
    for (stage, step), wake in spans.items():
        if not stage.endswith("wake_rewards"):
            continue
        sleep = spans[stage.replace("wake", "sleep"), step]
        assert not [s for s in trace.on("gpu") if s.begin < sleep.begin and s.end > wake.end], gantt(trace)
        asked = [
            m for m in trace.marks if m.args["step"] == step and bool(m.args.get("validation")) == (stage[0] == "v")
        ]
        assert asked
        assert all(wake.end <= m.begin < m.end <= sleep.begin for m in asked)
    counts = json.loads((directory / "summary.json").read_text())["rewards"]
    assert counts["failed"] == 0
    assert len({m.args["endpoint"] for m in trace.marks}) == 2
    capsys.readouterr()
    assert main(["plan", str(directory), "reward.models.rm.replicas=1"]) == 0
    assert "model 'rm': 1 server of 4 requests" in capsys.readouterr().out
    assert not [p for p in psutil.Process().children(recursive=True) if "models.hf.server" in " ".join(p.cmdline())]
