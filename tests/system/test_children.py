"""Code in the working directory is not executed, whichever process starts there."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dataflow.rewards.functions import FIELDS
from dataflow.rewards.judge.server import start_judge
from dataflow.rewards.processes import Pool, Recipe
from dataflow.system import children
from tests.rigs.interrupted import SLOW, interrupt
from tests.rigs.listening import Listener, check

ROOT = Path(__file__).parents[2]
TRAPS = (
    "aiohttp", "asyncio", "cloudpickle", "json", "loguru", "logging", "multiprocessing", "numpy", "pickle", "psutil",
    "pydantic", "ray", "selectors", "signal", "sitecustomize", "socket", "struct", "threading", "torch", "transformers",
    "usercustomize", "uvloop", "verl", "vllm", "yaml",
)  # fmt: skip
TRAP = "import os; open(os.path.join({mark!r}, {name!r}), 'w').close()\n"

PIPELINE = """
import json, os, runpy, sys
from pathlib import Path

from dataflow import Pipeline, stage
from dataflow.config.loading.pipeline_file import load_pipeline_file

grpo = load_pipeline_file(os.environ["GRPO"])
Config = grpo.Config


@stage(writes="looked", on="controller")
def look(advantages):
    import psutil

    rigs = Path(os.environ["RIGS"])
    listeners = runpy.run_path(rigs / "listening.py")["listeners"]
    seen = runpy.run_path(rigs / "processes.py")
    me = psutil.Process()
    run = next(p for p in [me, *me.parents()] if "name=marked" in p.cmdline())
    found = {
        "listeners": listeners(run),
        "commands": [seen["command"](p) for p in seen["below"](run)],
        "environment": [seen["environment"](p) for p in seen["below"](run)],
        "safe": [sys.flags.safe_path, os.environ.get("PYTHONSAFEPATH")],
    }
    if not os.path.exists(os.environ["FOUND"]):  # the signal may cut a later write short
        Path(os.environ["FOUND"]).write_text(json.dumps(found))
    return 1


def pipeline(config):
    made = grpo.pipeline(config)
    return Pipeline([*made.stages, look], inputs=made.inputs, resources=made.resources)
"""


REWARD = """
import os, sys

def compute_score(data_source, solution_str, ground_truth, extra_info):
    return [bool(sys.flags.safe_path), os.environ.get("PYTHONSAFEPATH")]
"""


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Makes a directory of modules that leave a mark when they are imported the working directory.

    Returns a function that tells which were.
    """
    here, mark = tmp_path / "here", tmp_path / "mark"
    here.mkdir()
    mark.mkdir()
    for name in TRAPS:
        (here / f"{name}.py").write_text(TRAP.format(mark=str(mark), name=name))
    (here / "dataflow").mkdir()
    (here / "dataflow" / "__init__.py").write_text(TRAP.format(mark=str(mark), name="dataflow"))
    monkeypatch.chdir(here)
    # What starts here finds this package by its path, not because it lies in the working directory.
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    return lambda: sorted(os.listdir(mark))


def test_the_traps_work(trapped: Callable[[], list[str]]) -> None:
    subprocess.run([sys.executable, "-c", "import json, aiohttp"], check=True, timeout=30)
    assert {"aiohttp", "json"} <= set(trapped())


def judge(_reward: str) -> None:
    with start_judge("0", 1.0, 0):
        pass


def spawn(reward: str) -> None:
    workers = Pool(Recipe(reward, "compute_score"), 1)
    try:
        assert asyncio.run(workers.call(dict.fromkeys(FIELDS, "x"))) == [True, None]
    finally:
        workers.close()


@pytest.mark.heavy
@pytest.mark.parametrize("start", [judge, spawn])
def test_no_process_of_ours_imports_from_the_working_directory(
    trapped: Callable[[], list[str]], tmp_path: Path, start: Callable[[str], None]
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    start(str(tmp_path / "reward.py"))
    assert trapped() == []


def test_a_program_that_user_code_starts_finds_the_modules_beside_it(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("ANSWER = 42\n")
    (tmp_path / "program.py").write_text("import helper; print(helper.ANSWER)\n")
    code = (
        "import subprocess, sys; from dataflow.system import children; children.restore_path()\n"
        "print(sys.flags.safe_path, subprocess.run([sys.executable, 'program.py'], capture_output=True).stdout)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with children.safe_path():
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env=environment | {"PYTHONSAFEPATH": os.environ["PYTHONSAFEPATH"]},
        )
    assert done.stdout.split("\n")[0] == "True b'42\\n'", done.stderr
    assert os.environ.get("PYTHONSAFEPATH") == environment.get("PYTHONSAFEPATH")


@pytest.mark.heavy
@pytest.mark.timeout(240)
def test_a_run_on_ray_executes_nothing_from_the_working_directory_listens_on_loopback_alone_and_stops_at_ctrl_c(
    trapped: Callable[[], list[str]], tmp_path: Path, tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    monkeypatch.setenv("FOUND", str(tmp_path / "found.json"))
    monkeypatch.setenv("RIGS", str(ROOT / "tests" / "rigs"))
    monkeypatch.setenv("GRPO", str(ROOT / "pipelines" / "gsm8k_grpo.py"))
    keys = ["engine.rollout=hf", "data.prompts=8", "engine.n=2", "engine.max_tokens=8", "data.max_prompt_length=200"]
    keys += ["data.train_size=200", "data.val_size=8"]
    keys += [f"model.path={tiny_qwen}", f"runs={tmp_path / 'runs'}", "name=marked", "executor=ray", *SLOW]
    # As the console script does it, whose directory takes the working directory's place on the path.
    script = tmp_path / "bin" / "dataflow"
    script.parent.mkdir()
    script.write_text("import sys\nfrom dataflow.cli import main\nsys.exit(main())\n")
    command = [sys.executable, str(script), "run", str(tmp_path / "pipeline.py"), *keys]
    interrupt(command, signal.SIGINT, tmp_path / "runs" / "marked", children=5)
    assert trapped() == []
    found = json.loads((tmp_path / "found.json").read_text())
    listening = [Listener(*each) for each in found["listeners"]]
    assert {"judge_server", "gcs_server", "raylet", "ray::*"} <= {each.process for each in listening}
    check(listening, sum(" ".join(command).startswith("ray::") for command in found["commands"]))
    assert found["safe"] == [True, None]
    assert not [each for each in found["environment"] if "RAY_AUTH_TOKEN" in each]
