"""What processes of a run import: nothing that takes seconds of CPU where it is not used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "verl", "pandas", "datasets", "matplotlib", "bokeh", "vllm")


def loaded(code: str, *arguments: str) -> list[str]:
    """Returns which heavy packages a process has imported after it ran some code."""
    script = f"import sys\n{code}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout.splitlines()[-1].replace("'", '"')))


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import dataflow.running.resume, dataflow.executors.ray, dataflow.data.prompts", id="driver"),
        pytest.param(
            "from dataflow.running.reporting.tracking import Tracker\n"
            "tracker = Tracker(sys.argv[1], ['tensorboard'])\ntracker.log(1, {'loss': 0.5})\ntracker.close()",
            id="tracker",
        ),
        pytest.param(
            "from dataflow.data.order import steps\nassert next(steps(9, 4, 0)) != next(steps(9, 4, None))", id="order"
        ),
        pytest.param("import dataflow.executors.ray.host, dataflow.executors.calling", id="any worker"),
    ],
)
def test_a_process_imports_only_what_it_needs(tmp_path: Path, code: str) -> None:
    assert loaded(code, str(tmp_path)) == []


SESSION = """
from dataflow.config.loading.saved import load
from dataflow.running.reporting.progress import Progress
from dataflow.running.resume import began
from dataflow.running.session import Session
arguments = [f"model.path={sys.argv[1]}", f"runs={sys.argv[2]}", "engine.rollout=hf"]
session = began(*load("pipelines/gsm8k_grpo.py", arguments), arguments, Progress(quiet=True), Session)
assert len(session.inputs["prompts"](1)) == 32
"""


@pytest.mark.heavy
def test_a_session_is_made_without_torch(tmp_path: Path, tiny_qwen: Path) -> None:
    assert loaded(SESSION, str(tiny_qwen), str(tmp_path)) == []
