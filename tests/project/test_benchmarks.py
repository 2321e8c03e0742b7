"""Each benchmark starts; the short ones run through. `make bench ARGS=--smoke` runs all of them, in ten minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.benchmarks import benchmark

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHORT = ("auto", "policies", "trace")


@pytest.mark.heavy
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", SHORT)
def test_a_benchmark_runs_through(name: str, tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("smoke: it works; no bound was judged.\n")


@pytest.mark.heavy
@pytest.mark.timeout(920)
def test_what_measures_a_gpu_is_rehearsed_on_a_cpu(tmp_path: Path) -> None:
    """Else the minutes of a rented GPU are spent on mending the script."""
    environment = {**os.environ, "PYTHON": sys.executable, "BUNDLE": "none"}
    command = [BENCHMARKS / "gpu" / "run.sh", tmp_path, "--cpu", "executor=inline"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "table.json").read_text())
    assert {code for _part, code, _seconds in found["parts"]} == {"0"}
    assert list(found["runs"]) == ["alone", "baseline", "both", "lora"]
    assert all(run["gradient norm"] > 0 for run in found["runs"].values()), "they train"
    assert set(found["predicted"]) == {"baseline", "both"}
    page = (tmp_path / "table.md").read_text()
    assert "| seconds a step |" in page
    assert "Predicted from the baseline: both " in page


def test_a_gpu_table_has_what_a_stopped_run_left(tmp_path: Path) -> None:
    """The minutes are few: a run that its time limit ended must not cost the figures before it."""
    work = tmp_path / "work"
    (work / "runs" / "baseline").mkdir(parents=True)
    (work / "parts.tsv").write_text("baseline\tstopped after 9 s\t9\n")
    rows = [{"timing_s/step": seconds, "actor/grad_norm": 0.5} for seconds in (9.0, 2.0, 4.0)]
    text = "\n".join(map(json.dumps, rows)) + '\n{"timing_s/st'
    (work / "runs" / "baseline" / "metrics.jsonl").write_text(text)
    (work / "baseline.memory").write_text("1024\n20480\n20")
    (work / "plan.out").write_text('{"policies": [')
    subprocess.run([sys.executable, BENCHMARKS / "gpu" / "table.py", work, tmp_path], check=True, timeout=60)
    found = json.loads((tmp_path / "table.json").read_text())
    assert found["runs"]["baseline"]["seconds a step"] == 3.0, "without the first"
    assert found["runs"]["baseline"]["GPU memory in use at most, GiB"] == 20.0
    assert "| baseline | stopped after 9 s | 9 |" in (tmp_path / "table.md").read_text()


@pytest.mark.parametrize(
    ("name", "argument", "said"),
    [
        ("policies", "steps=-7", "steps=-7: give a whole number of 1 or more."),
        ("policies", "step=7", "unknown: step=7; use steps=N out=DIR."),
        ("kills", "engines=hf,sglang", "use times=N"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(
    name: str, argument: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with benchmark(name) as bench, pytest.raises(SystemExit) as ended:
        bench.main([argument])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(said)


@pytest.mark.parametrize(("bound", "code"), [(1e9, 0), (0.0, 1)])
def test_a_missed_bound_ends_a_benchmark_with_1(
    bound: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with benchmark("scheduler") as bench:
        monkeypatch.setattr(bench, "BOUND_US", bound)
        monkeypatch.setattr(bench, "BOUND_S", 1e9)
        monkeypatch.setattr(bench, "BOUND_MB", 1e9)  # of this process, with all that other tests have imported
        arguments = ["--tasks", "1000", "--steps", "2", "-o", str(tmp_path / "scheduler.json")]
        assert bench.main(arguments) == code
