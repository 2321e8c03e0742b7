"""The scripts of examples/api are short, and do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples" / "api").glob("*.py"))
SAID = {
    "plan_costs": "both",
    "resume_run": "3 steps, resumed.html",
    "run_toy": "5 steps, toy.txt",
    "simulate_policies": "baseline",
}
heavy = pytest.mark.heavy


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "script", [pytest.param(s, marks=heavy if s.stem == "resume_run" else ()) for s in SCRIPTS], ids=lambda s: s.stem
)
def test_a_script_runs(script: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert SAID[script.stem] in done.stdout
