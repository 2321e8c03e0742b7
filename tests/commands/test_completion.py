"""Words that a shell completes: commands, files, runs, and the keys and values of the pipeline on the line."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from argcomplete import io as argcomplete_io

from dataflow.cli import main, make_parser
from dataflow.commands import completion
from dataflow.commands.completion import finder, keys, words
from dataflow.config.base import POLICIES
from dataflow.policy import AUTO, PRESETS, preset
from dataflow.rewards.naming import MANAGERS

ROOT = Path(__file__).parents[2]
GRPO = str(ROOT / "pipelines" / "gsm8k_grpo.py")
OWN = """
from typing import Literal
from dataflow import Pipeline, stage
from dataflow.config.base import PipelineConfig

class Config(PipelineConfig):
    colour: Literal["red", "green"] = "red"
    '''Of the pipeline. More.'''

@stage(writes="mean", on="gpu", role="trains")
def train(): ...
def pipeline(config): return Pipeline([train])
"""


class Ended(Exception):
    pass


class Finder(finder.Finder):
    def _init_debug_stream(self) -> None:  # it would take descriptor 9, which may be the test runner's
        argcomplete_io.debug_stream = sys.stderr


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def complete(monkeypatch: pytest.MonkeyPatch, line: str) -> list[str]:
    """Returns what stands at the end of a line."""
    given = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_SHELL": "bash"}
    given |= {"COMP_LINE": f"dataflow {line}", "COMP_POINT": str(len(line) + 9), "_ARGCOMPLETE_SUPPRESS_SPACE": "1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    parser, out = make_parser(), io.StringIO()
    words.attach(parser)

    def end(code: int) -> None:
        raise Ended

    with pytest.raises(Ended):
        Finder()(parser, always_complete_options=False, exit_method=end, output_stream=out)
    return out.getvalue().split("\n") if out.getvalue() else []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ex", ["export"]),
        ("completion ", ["bash", "zsh", "fish"]),
        ("run --", ["--help", "--keys", "--json", "--quiet"]),
        ("run P policy=b", ["policy=baseline", "policy=both", "policy=both+stream"]),
        ("run P engine.top", ["engine.top_p=", "engine.top_k="]),
        ("run P engine.top_p=0.9 engine.top", ["engine.top_k="]),
        ("run P --quiet step", ["steps="]),
        ("run P steps=", ["steps=30"]),
        ("run P policy.order=", ["policy.order=arrival", "policy.order=index"]),
        ("run P ray.fork=", ["ray.fork=true", "ray.fork=false"]),
        ("run P reward.manager=", [f"reward.manager={name}" for name in MANAGERS]),
        ("run P reward.on_failure=drop_", ["reward.on_failure=drop_sample", "reward.on_failure=drop_group"]),
        ("run P reward.on_failure=s", ["reward.on_failure=score:0"]),
        ("run P algorithm.rollout_rs=token_k1", ["algorithm.rollout_rs=token_k1"]),
        ("run P policy.split=", []),
        ("run P policy.stream_rollout=n", ["policy.stream_rollout=null"]),
        ("run P nothing=", []),
        ("run P tracking.backends=", None),
        ("run P reward.models.rm.tensor", ["reward.models.rm.tensor_parallel="]),
        ("run P reward.models.rm.engine=h", ["reward.models.rm.engine=hf"]),
        ("show P steps=2 -o x.svg val.ev", ["val.every="]),
        ("compare P val.ev", ["val.every="]),
        ("plan x.csv reward.conc", ["reward.concurrency="]),
        ("samples runs/a wh", ["where="]),
        ("run missing.py pol", []),
    ],
)
@pytest.mark.slow
def test_words_and_keys(monkeypatch: pytest.MonkeyPatch, line: str, expected: list[str] | None) -> None:
    found = complete(monkeypatch, line.replace("P ", f"{GRPO} ", 1))
    if expected is None:
        assert "tracking.backends=\\[wandb\\]" in found
    else:
        assert found == expected


def test_sections_are_offered_by_name_until_one_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    found = complete(monkeypatch, f"run {GRPO} ")
    assert {"steps=", "policy=", "policy.", "engine.", "reward."} <= set(found)
    assert not [word for word in found if word.startswith("engine.t")]
    assert complete(monkeypatch, f"run {GRPO} custom") == [
        "custom_reward_function.path=", "custom_reward_function.name=", "custom_reward_function.reward_kwargs=",
    ]  # fmt: skip


def test_the_policies_that_are_offered_exist() -> None:
    assert {*PRESETS, AUTO} <= set(POLICIES)
    for name in {*POLICIES} - {AUTO}:
        preset(name, mini_batches=4)


def test_files_runs_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/a/checkpoints/step_000012", "runs/a/samples", "runs/empty", "other/b", "data"):
        Path(name).mkdir(parents=True)
    for name in ("runs/a/trace.json", "other/b/config.yaml", "my.py", "train.jsonl", "data/x.parquet", ".hidden.py"):
        Path(name).touch()
    Path("runs/a/samples/step_000003.parquet").touch()
    Path("runs/a/samples/val_000000.parquet").touch()
    assert complete(monkeypatch, "timeline ru") == ["runs/a"]
    assert complete(monkeypatch, "timeline runs/") == ["runs/empty/", "runs/a"]
    assert complete(monkeypatch, "resume other/") == ["other/b"]
    assert complete(monkeypatch, "run m") == ["my.py"]
    assert complete(monkeypatch, "run .h") == [".hidden.py"]
    assert "train.jsonl" not in complete(monkeypatch, "run ")
    assert complete(monkeypatch, "export runs/a step=") == ["step=12"]
    assert complete(monkeypatch, "samples runs/a step=3") == ["step=3"]
    assert complete(monkeypatch, "samples runs/a val=") == ["val=0"]
    assert complete(monkeypatch, f"run {GRPO} data.train=tr") == ["data.train=train.jsonl"]
    assert complete(monkeypatch, f"run {GRPO} data.train=data/") == ["data.train=data/x.parquet"]


def test_keys_come_from_the_cache_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    assert complete(monkeypatch, f"run {own} colour=") == ["colour=red", "colour=green"]
    (key,) = [key for key in keys.keys_of_file(str(own)) if key.name == "colour"]
    assert key.help == "Of the pipeline"
    loaded = []
    monkeypatch.setattr("dataflow.config.loading.saved.load_pipeline_file", lambda path: loaded.append(path))
    assert complete(monkeypatch, f"run {own} colour=g") == ["colour=green"]
    assert loaded == []
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own.write_text(OWN.replace('"green"', '"blue"'))
    os.utime(own, ns=(1, 1))
    assert complete(monkeypatch, f"run {own} colour=") == ["colour=red", "colour=blue"]


@pytest.mark.parametrize("damage", ["", "[]", '{"revision": 1}', "unwritable"])
def test_a_damaged_cache_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN)
    if damage == "unwritable":
        (tmp_path / "cache").write_text("a file")
    else:
        keys.keys_of_file(str(own))
        (kept,) = (tmp_path / "cache").rglob("*.json")
        assert json.loads(kept.read_text())["keys"]
        kept.write_text(damage)
    assert complete(monkeypatch, f"run {own} colo") == ["colour="]


def test_a_pipeline_that_cannot_be_loaded_has_no_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('x')")
    assert complete(monkeypatch, f"run {tmp_path / 'broken.py'} pol") == []


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_code_for_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    code = capsys.readouterr().out
    assert "dataflow" in code
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=code, capture_output=True, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (0, "")


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["completion", "tcsh"])
    assert end.value.code == 2
    assert "'tcsh' (choose from" in capsys.readouterr().err


@pytest.mark.slow
def test_bash_gets_the_words_and_no_engine_is_imported(tmp_path: Path) -> None:
    line = f"dataflow run {GRPO} policy=mini"
    call = (
        'complete_it() { COMP_LINE="$1"; COMP_POINT=${#1}; COMP_TYPE=9; _python_argcomplete dataflow; }\n'
        f'complete_it "{line}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    program = tmp_path / "dataflow"
    program.write_text(
        f"#!{sys.executable} -P\nimport os, sys\nfrom dataflow.__main__ import main\n"
        "end = os._exit\n"
        "def say(code):\n"
        f"    open({str(tmp_path / 'loaded')!r}, 'w').write(' '.join(sys.modules)); end(code)\n"
        "os._exit = say\nmain()\n"
    )
    program.chmod(0o755)
    code = completion.script("bash")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    for _ in range(2):  # the second time from the cache
        done = subprocess.run(
            ["bash", "-c", f"{code}\n{call}"], capture_output=True, text=True, timeout=60, env=environment
        )
        assert [word.strip() for word in done.stdout.split()] == ["mini-batch", "mini-batch+stream"], done.stderr
        loaded = set((tmp_path / "loaded").read_text().split())
        assert "argcomplete" in loaded
        assert not loaded & {"torch", "ray", "verl", "transformers", "vllm"}
    assert not loaded & {"pydantic", "numpy"}, "the cache does without them"


def test_files_whose_names_no_shell_can_be_sent_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (b"good.py", "größe.py".encode(), b"bad\xff.py", b"two\nlines.py", b"esc\x1b[31m.py"):
        Path(os.fsdecode(name)).touch()
    for folder in (b"one", b"r\nnl", b"r\xff"):
        Path("runs", os.fsdecode(folder)).mkdir(parents=True)
        Path("runs", os.fsdecode(folder), "config.yaml").touch()
    assert complete(monkeypatch, "run ") == ["good.py", "größe.py", "runs/"]
    assert complete(monkeypatch, "timeline ") == ["runs/one"]
