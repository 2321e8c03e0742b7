"""A run on Ray listens on loopback alone, at the ports in SECURITY.md, and Ctrl-C ends it with all its processes."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from tests.rigs.interrupted import SLOW, interrupt
from tests.rigs.listening import Listener, check

ROOT = Path(__file__).parents[2]
PIPELINE = """
import json, os, runpy
from pathlib import Path

from dataflow import Pipeline, stage
from dataflow.config.loading.pipeline_file import load_pipeline_file

grpo = load_pipeline_file(os.environ["GRPO"])
Config = grpo.Config


@stage(writes="looked", on="controller")
def look(advantages):
    import psutil

    rigs = Path(os.environ["RIGS"])
    me = psutil.Process()
    run = next(p for p in [me, *me.parents()] if "name=marked" in p.cmdline())
    found = {
        "listeners": runpy.run_path(rigs / "listening.py")["listeners"](run),
        "workers": sum(" ".join(p.cmdline()).startswith("ray::") for p in run.children(recursive=True)),
    }
    if not os.path.exists(os.environ["FOUND"]):  # the signal may cut a later write short
        Path(os.environ["FOUND"]).write_text(json.dumps(found))
    return 1


def pipeline(config):
    made = grpo.pipeline(config)
    return Pipeline([*made.stages, look], inputs=made.inputs, resources=made.resources)
"""


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_a_run_on_ray_listens_on_loopback_alone_and_stops_at_ctrl_c(
    tmp_path: Path, tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    monkeypatch.setenv("FOUND", str(tmp_path / "found.json"))
    monkeypatch.setenv("RIGS", str(ROOT / "tests" / "rigs"))
    monkeypatch.setenv("GRPO", str(ROOT / "pipelines" / "gsm8k_grpo.py"))
    keys = ["engine.rollout=hf", "data.prompts=8", "engine.n=2", "engine.max_tokens=8", "data.max_prompt_length=200"]
    keys += ["data.train_size=200", "data.val_size=8"]
    keys += [f"model.path={tiny_qwen}", f"runs={tmp_path / 'runs'}", "name=marked", "executor=ray", *SLOW]
    command = [sys.executable, "-m", "dataflow", "run", str(tmp_path / "pipeline.py"), *keys]
    interrupt(command, signal.SIGINT, tmp_path / "runs" / "marked", children=5)
    found = json.loads((tmp_path / "found.json").read_text())
    listening = [Listener(*each) for each in found["listeners"]]
    assert {"judge_server", "gcs_server", "raylet", "ray::*"} <= {each.process for each in listening}
    check(listening, found["workers"])
