"""The agent against a model, in a process of its own: see reward_machine.py.

It compares what is told when garbage is collected, too (tasks whose error nobody took), and so must not share a
process with two thousand other tests, after which that happens at other moments.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(280)]


def test_the_agent_does_what_the_model_does(request: pytest.FixtureRequest) -> None:
    profile = request.config.getoption("--hypothesis-profile") or "full"
    file = Path(__file__).parents[1] / "rigs" / "reward_machine.py"
    command = [sys.executable, "-m", "pytest", "-q", str(file), f"--hypothesis-profile={profile}"]
    done = subprocess.run(command, cwd=file.parents[2], capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stdout[-8000:]
