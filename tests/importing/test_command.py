"""`dataflow import-verl`: options before and behind the launch; bad input is one sentence and exit code 2."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from dataflow.cli import main
from dataflow.importing.command import table
from tests.importing.launches import GRPO, filled

LAUNCH = ("python3", "-m", "verl.trainer.main_ppo", "trainer.total_training_steps=5", "trainer.n_gpus_per_node=2")
needs_verl = pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text("{}\n" * 2048)
    file = tmp_path / "launch.sh"
    file.write_text(filled(GRPO, "train.jsonl"))
    return file


@pytest.mark.slow
@needs_verl
def test_the_script_is_printed_or_written(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-verl", "launch.sh"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/usr/bin/env bash\n# Made by 'dataflow import-verl' from launch.sh (verl 0.9)")
    for words in (["-o", "new.sh", "launch.sh"], ["launch.sh", "-o", "new.sh"]):
        assert main(["import-verl", *words]) == 0
        assert "new.sh: 32 overrides, 0 keys without a counterpart; its first lines" in capsys.readouterr().out
        assert Path("new.sh").read_text() == printed
        assert os.access("new.sh", os.X_OK)
        Path("new.sh").unlink()


@pytest.mark.slow
@needs_verl
def test_the_launch_itself_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-verl", *LAUNCH]) == 0
    assert "steps=5 " in capsys.readouterr().out


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import-verl", "--keys"]) == 0
    assert capsys.readouterr().out.strip() == table()
    assert "| `data.train_batch_size` | `data.prompts` |  |" in table()


@needs_verl
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give a launch script of verl, its resolved configuration"),
        (["nothing.sh"], "nothing.sh: there is no such file"),
        (["empty.sh"], "no command that it reaches launches verl.trainer.main_ppo"),
        (["odd.yaml"], "odd.yaml cannot be read as YAML: "),
        (["other.yaml"], "it is no configuration of verl"),
        (["resolved.yaml", "a=1"], "is a whole configuration; change it there"),
        (["data.train_batch_size=5"], "give a launch script of verl"),
        (["launch.sh", "-o"], "-o needs the name of the script to write"),
        (["launch.sh", "trainer.n_gpus_per_node=0", "-o", "kept.sh"], "trainer.n_gpus_per_node=0: give a whole number"),
    ],
)
def test_bad_input_is_one_sentence(
    script: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    Path("empty.sh").write_text("")
    Path("odd.yaml").write_text("a: [")
    Path("other.yaml").write_text("model: x")
    Path("resolved.yaml").write_text("actor_rollout_ref: {}")
    Path("kept.sh").write_text("before")
    assert main(["import-verl", *words]) == 2
    out, said = capsys.readouterr()
    assert out == ""
    assert message in said
    assert said.startswith("ConfigError: ")
    assert said.count("\n") == 1
    assert Path("kept.sh").read_text() == "before"
