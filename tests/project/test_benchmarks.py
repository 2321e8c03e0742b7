"""Each benchmark runs, and its exit code says whether its bounds are held."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rigs.benchmarks import benchmark

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.heavy
@pytest.mark.timeout(420)
@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("[!_]*.py")), ids=lambda file: file.stem)
def test_a_benchmark_runs_through(file: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, file, "--smoke"], capture_output=True, text=True, timeout=400, cwd=tmp_path)
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


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("what", ["delays", "actor", "http"])
def test_a_reward_agent_that_falls_short_of_a_bound_ends_its_benchmark_with_1(
    what: str, held: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench: Any = importlib.import_module("reward_agent")
    row = {**dict.fromkeys([*bench.NAMES, "bare_s"], 1.0), "held": held}

    async def nothing(*_given: Any) -> float:
        return 1.0

    monkeypatch.setattr(bench, "once", nothing)
    monkeypatch.setattr(bench, "behind_a_straggler", nothing)
    monkeypatch.setattr(bench, "settle_memory", lambda: None)
    monkeypatch.setattr(bench, "slowness", lambda *_given: 1.0)
    monkeypatch.setattr("dataflow.models.tiny.tiny_model", lambda: tmp_path)
    tokenizers = SimpleNamespace(from_pretrained=lambda _path: None)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=tokenizers))
    monkeypatch.setattr(bench, "delayed", lambda *_given: [{**row, "held": True}, row])
    monkeypatch.setattr(bench, "in_actor", lambda *_given: [row])
    monkeypatch.setattr(bench, "over_http", lambda *_given: row)
    assert bench.main([what, "-o", str(tmp_path / "out.json")]) == (0 if held else 1)
    found = json.loads((tmp_path / "out.json").read_text())
    assert {"slower", what} <= found.keys()
    assert capsys.readouterr().err.count("falls short") == (not held)


@pytest.mark.heavy
def test_reward_models_are_measured_and_a_bound_that_is_exceeded_ends_the_benchmark_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with benchmark("reward_models") as bench:
        assert bench.ideal([1.0, 2.0], 3 * bench.SLOTS) == 2.0
        row = bench.balance(1, 24, (0.01, 0.05))
        assert sum(map(int, row["by_server"].split("/"))) == row["requests"] == 24
        for held in (True, False):
            monkeypatch.setattr(bench, "balance", lambda *_given, held=held: {**row, "held": held})
            assert bench.main(["-o", str(tmp_path / "out.json")]) == (0 if held else 1)
            assert capsys.readouterr().err.count("falls short") == (not held)


@pytest.mark.parametrize("seconds", [10.0, 13.0])
def test_a_start_that_takes_too_long_ends_its_benchmark_with_1(
    seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with benchmark("start") as bench:
        found = {"output_s": 0.5, "task_s": seconds, "end_s": 2.0, "cpu_s": 9.0, "cpu": {"ray::trainer": 9.0}}
        monkeypatch.setattr(bench.subprocess, "run", lambda *_given, **_keys: subprocess.CompletedProcess([], 0))
        monkeypatch.setattr(bench, "timed", lambda *command: (6.0, 4.0) if bench.TRL in command else (0.1, 0.1))
        monkeypatch.setattr(bench, "started", lambda *_given: dict(found))
        assert bench.main(["--rounds", "2", "-o", str(tmp_path / "out.json")]) == (1 if seconds > 12 else 0)
        assert bench.name_of(["python", "-P", "-m", "dataflow.rewards.judge"]) == "dataflow.rewards.judge"
        assert bench.name_of(["ray::controller.run"]) == "ray::controller"
    assert "ray::trainer" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out.json").read_text())["hf"]) == 2


@pytest.mark.parametrize(("mb", "code"), [(1900, 1), (1500, 0)])
def test_a_run_of_twice_the_memory_of_trl_ends_its_benchmark_with_1(
    mb: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with benchmark("memory") as bench:
        small = "import time; held = bytearray(80 << 20); time.sleep(1.2)"
        trl = bench.followed([sys.executable, "-c", small])
        assert 80 <= trl["mb"] < 200
        trl["mb"] = 900
        run = {"mb": mb, "processes": 13, "by_process": {"ray::trainer": 400}}
        monkeypatch.setattr(bench, "followed", lambda command: trl if bench.TRL in command else run)
        monkeypatch.setattr(bench.subprocess, "run", lambda *_given, **_keys: subprocess.CompletedProcess([], 0))
        assert bench.main(["-o", str(tmp_path / "out.json")]) == code
    assert "ray::trainer" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["dataflow"]["mb"] == mb


@pytest.mark.parametrize(
    ("name", "argument", "said"),
    [
        ("hand_offs", "steps=5", "steps=5: give a whole number of 6 or more, so that there are steps to judge."),
        ("hand_offs", "steps=x", "steps=x: give a whole number of 6 or more, so that there are steps to judge."),
        ("hand_offs", "steps=-7", "steps=-7: give a whole number"),
        ("hand_offs", "step=7", "unknown: step=7; use steps=N policy=NAME out=FILE."),
        ("hand_offs", "steps", "unknown: steps; use steps=N policy=NAME out=FILE."),
        ("hand_offs", "policy=bth", "unknown policy 'bth'; did you mean 'both'?"),
        ("accuracy", "jobs=0", "jobs=0: give a whole number of 1 or more."),
        ("policies", "steps=-7", "steps=-7: give a whole number of 1 or more."),
        ("policies", "step=7", "unknown: step=7; use steps=N out=DIR."),
        ("kills", "engines=hf,sglang", "use times=N"),
        ("kills", "times=1.5", "times=1.5: give a whole number of 1 or more."),
        ("resumes", "victims=judge+nobody", "use times=N"),
        ("recipes", "seeds=x", "seeds=x: give a whole number of 1 or more."),
        ("resumes", "seed=x", "seed=x: give a whole number of 0 or more."),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_runs(
    name: str, argument: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with benchmark(name) as bench:
        for start in ("start", "measure", "trials"):
            monkeypatch.setattr(bench, start, lambda *_given, **_keys: pytest.fail("it started"), raising=False)
        with pytest.raises(SystemExit) as ended:
            bench.main([argument])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith(said)
    assert printed.count("\n") == 1


@pytest.mark.parametrize("name", ["accuracy", "hand_offs", "kills", "policies", "recipes", "resumes"])
def test_help_is_the_benchmarks_description(name: str) -> None:
    found = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--help"], capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert f"python benchmarks/{name}.py [" in found.stdout


def test_hand_offs_runs_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    started: dict[str, Any] = {}

    def ends(*_given: Any, **keys: Any) -> Any:
        started.update(keys)
        raise SystemExit("it started")

    with benchmark("hand_offs") as bench:
        monkeypatch.setattr(bench, "start", ends)
        with pytest.raises(SystemExit, match="it started"):
            bench.main(["steps=6", "policy=auto"])
    assert (started["steps"], started["policy"]) == (6, "auto")


@pytest.mark.parametrize("argument", ["--workloads=0", "--workloads=-1", "--workers=0", "--real=0", "--real=-1"])
def test_auto_refuses_wrong_numbers_before_anything_runs(
    argument: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    bench: Any = importlib.import_module("auto")
    for begin in ("workloads", "measure_real"):
        monkeypatch.setattr(bench, begin, lambda *_given: pytest.fail("it began"))
    with pytest.raises(SystemExit) as ended:
        bench.main([argument])
    assert ended.value.code == 2
    assert f"{argument.partition('=')[0]}: give 1 or more." in capsys.readouterr().err
