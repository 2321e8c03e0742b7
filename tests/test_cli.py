"""The command line with wrong input: one sentence on stderr, exit code 2, nothing written or started."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dataflow.cli import main

ROOT = Path(__file__).parents[1]
PIPELINE = str(ROOT / "pipelines" / "gsm8k_grpo.py")
PROBLEM = {"question": "What is 3 + 4?", "answer": "3 + 4 = 7\n#### 7"}


def lines(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *overrides: str) -> str:
    """Runs with wrong input; returns the sentence that it ends with."""
    code = main(["run", PIPELINE, *overrides, f"runs={tmp_path / 'runs'}"])
    err = capsys.readouterr().err.strip()
    assert code == 2, err
    assert len(err.splitlines()) == 1, err
    assert not (tmp_path / "runs").exists(), "a run that cannot start must leave nothing behind"
    return err


def test_unknown_policy_and_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean 'both'" in refused(capsys, tmp_path, "policy=bth")
    assert "did you mean 'trainer.world_size'" in refused(capsys, tmp_path, "trainer.worldsize=2")


def test_numbers_that_do_not_fit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, tmp_path, "trainer.mini_batches=3", "data.prompts=64")
    assert said == "PolicyError: trainer.mini_batches=3 does not divide 64 prompt groups; use 1, 2, 4, 8, 16, 32 or 64."
    said = refused(capsys, tmp_path, "policy.split=3")
    assert said == "PolicyError: policy.split=3 does not divide mini_batches=4; use policy.split=1, 2 or 4."
    assert "max_staleness=5" in refused(capsys, tmp_path, "policy.max_staleness=5")


def test_an_estimator_over_the_whole_batch_cannot_be_split(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, tmp_path, "algorithm.adv_estimator=reinforce_plus_plus", "policy=mini-batch")
    assert said.startswith("PolicyError: stage 'advantage' needs the whole batch (adv_estimator 'reinforce_plus_plus' ")


@pytest.mark.heavy
def test_bad_data(capsys: pytest.CaptureFixture[str], tmp_path: Path, tiny_qwen: Path) -> None:
    # vLLM sets up room for prompts of data.max_prompt_length, which this model has not.
    model = [f"model.path={tiny_qwen}", "engine.rollout=hf"]

    def said(file: Path, *more: str) -> str:
        return refused(capsys, tmp_path, *model, f"data.train={file}", *more)

    assert "there is no such file" in said(tmp_path / "missing.jsonl")
    assert "line 2: this is not JSON" in said(lines(tmp_path / "cut.jsonl", PROBLEM, '{"question": "Wh'))
    no_mark = {"question": "What is 3 + 4?", "answer": "7"}
    assert "line 1: the answer has no number behind a last '####'" in said(lines(tmp_path / "bare.jsonl", no_mark))
    long = lines(tmp_path / "long.jsonl", *[PROBLEM] * 40, {**PROBLEM, "question": "many " * 300})
    text = said(long)
    assert "line 41" in text
    assert "data.max_prompt_length=1024" in text
    assert "data.filter_overlong_prompts=true" in text
    assert "fewer than the 32 of a step" in said(lines(tmp_path / "few.jsonl", PROBLEM))


@pytest.mark.parametrize("command", ["timeline", "samples", "export", "resume"])
@pytest.mark.parametrize(("given", "near"), [("sums2", "runs/sums1"), ("ab", None)])
def test_a_run_that_is_not_there_is_told_by_one_that_is(
    command: str,
    given: str,
    near: str | None,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/sums1", "runs/sums22", "abc", "sums", "runs/y"):
        Path(name).mkdir(parents=True)
    Path("runs/sums1/trace.json").write_text("{}")
    Path("abc/config.yaml").write_text("name: project")  # as init makes it
    assert main([command, given]) == 2
    said = capsys.readouterr().err
    assert said.count(given) == 1
    assert ("did you mean" in said) == (near is not None)
    if near is not None:
        assert said.endswith(f"; did you mean '{near}'?\n")


def test_files_that_are_no_pipeline_or_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", str(tmp_path / "no.py")]) == 2
    assert "no pipeline file" in capsys.readouterr().err
    assert main(["timeline", str(tmp_path / "no-run")]) == 2
    assert "no run at" in capsys.readouterr().err
    (tmp_path / "trace.json").write_text("{")
    assert main(["timeline", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert main(["compare", PIPELINE, "policy=both"]) == 2
    assert "compare sets policy and name itself" in capsys.readouterr().err


@pytest.mark.slow
def test_show_prints_the_stages_and_the_unrolled_graph(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["show", PIPELINE, "policy=both", "steps=2"]) == 0
    out = capsys.readouterr().out
    assert "weights_version from sync_weights (of 1 + max_staleness steps before)" in out
    assert re.search(r"^ *rollout\[2\] +gpu +at once", out, re.MULTILINE)
    assert main(["show", PIPELINE, "policy=baseline", "steps=2", "--json", "val.every=0"]) == 0
    graph = json.loads(capsys.readouterr().out)
    assert ["sync_weights[1]", "rollout[2]"] in graph["edges"]
    for name in ("graph.mmd", "graph.svg"):
        assert main(["show", PIPELINE, "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).stat().st_size > 500
    capsys.readouterr()
    assert main(["show", PIPELINE, "-o", str(tmp_path / "beside.mmd"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"]
    assert (tmp_path / "beside.mmd").read_text() == (tmp_path / "graph.mmd").read_text()


@pytest.mark.slow
def test_help_shows_an_example() -> None:
    for command in ("run", "show", "timeline", "samples", "compare"):
        shown = subprocess.run(
            [sys.executable, "-m", "dataflow", command, "-h"], capture_output=True, text=True, timeout=30
        )
        assert f"example: dataflow {command}" in shown.stdout


class _Panic(BaseException):
    """What an extension module may raise when its import is interrupted."""


@pytest.mark.parametrize("kind", [_Panic, ImportError])
def test_an_error_that_takes_the_place_of_an_interrupt_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[BaseException]
) -> None:
    def act(_options: object) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        except KeyboardInterrupt:
            raise kind("no module") from None
        return 0

    monkeypatch.setattr("dataflow.commands.show.show", act)
    assert main(["show", PIPELINE]) == 143
    assert capsys.readouterr().err.strip() == "interrupted"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's device that is always full")
def test_output_to_a_full_disk_is_an_error_in_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "dataflow", "run", "--keys"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 1
    assert ended.stderr == "RunError: the output cannot be written: No space left on device; make room there.\n"


@pytest.mark.heavy
@pytest.mark.parametrize("closed", [1, 2])
def test_a_standard_stream_that_is_closed_changes_nothing(closed: int) -> None:
    command = [sys.executable, "-m", "dataflow", "run", "--keys"]
    ended = subprocess.run(["sh", "-c", f'exec "$@" {closed}>&-', "sh", *command], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ("trainer.lr" in ended.stdout) == (closed != 1)
