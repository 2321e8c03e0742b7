"""What processes of a run import: nothing that takes seconds of CPU where it is not used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "verl", "pandas", "datasets", "matplotlib", "vllm")


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
        pytest.param("import dataflow.executors.ray.host, dataflow.executors.calling", id="any worker"),
    ],
)
def test_a_process_imports_only_what_it_needs(tmp_path: Path, code: str) -> None:
    assert loaded(code, str(tmp_path)) == []
