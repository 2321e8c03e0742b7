"""Input that is wrong in every way we know of: exit code 2, one sentence, nothing left behind and nothing started.

Nothing here needs torch or Ray: each case is refused before they are imported.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dataflow import __version__
from dataflow.cli import main
from tests.test_cli import PIPELINE

Said = Callable[..., str]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, in which nothing may appear."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "cache"


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, cache: Path) -> Iterator[Said]:
    """Runs a pipeline with wrong input; returns the sentence that it ends with."""
    before: set[Path] = set()

    def run(*overrides: str, pipeline: str = PIPELINE, runs: Path | str | None = None) -> str:
        before.update(tmp_path.rglob("*"))
        place = [] if any(text.startswith("runs=") for text in overrides) else [f"runs={runs or tmp_path / 'runs'}"]
        try:
            code = main(["run", pipeline, *overrides, *place])
        except SystemExit as ended:
            code = int(str(ended.code))
        err = capsys.readouterr().err
        assert code == 2, err
        assert len(err.splitlines()) == 1, err
        assert err[:-1].isprintable(), err
        assert "Traceback" not in err
        return err

    yield run
    if not before:
        return  # the test has refused nothing
    left = {path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts} - before
    assert not left, f"input that is refused left something behind: {left}"


@pytest.mark.parametrize("what", ["a directory", "no ledger", "another database"])
def test_a_cache_that_cannot_be_used_is_refused_before_anything_starts(
    tmp_path: Path, refused: Said, what: str
) -> None:
    path = tmp_path / "cache.sqlite"
    if what == "a directory":
        path.mkdir()
    elif what == "no ledger":
        path.write_text("text that is no database, long enough to be one " * 20)
    elif what == "another database":
        with closing(sqlite3.connect(path)) as db:
            db.execute("create table samples (step, score)")
            db.commit()
    file = what in ("no ledger", "another database")
    before = path.read_bytes() if file else b""
    assert re.match(r"ConfigError: reward(\.cache=| ledger )", refused(f"reward.cache={path}"))
    if file:
        assert path.read_bytes() == before, "what is not ours is not changed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("judge.url=[http://a,http://b]", "for several servers give a router's"),
        ('policy="both', "put quotes around a text"),
        ("steps", "write it so, such as steps=5"),
    ],
)
def test_a_value_that_is_wrong(refused: Said, argument: str, message: str) -> None:
    assert message in refused(argument)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "both"], "keys are written without dashes, policy=both"),
        (["--policy=both"], "keys are written without dashes, policy=both"),
        (["--max-tokens", "5"], "max_tokens=5"),
        (["-x"], "unrecognized arguments: -x"),
        (["steps", "5"], "is not key=value"),
    ],
)
def test_options_of_another_programs_kind(refused: Said, arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


@pytest.mark.parametrize("arguments", [[], ["flee"], ["show"], ["run"], ["timeline"], ["plan", "--port", "1"]])
def test_a_command_that_is_incomplete_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    if arguments:
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_version_and_keys_need_no_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dataflow {__version__}\n"
    assert main(["run", "--keys"]) == 0
    assert "trainer.lr=1.0e-06" in capsys.readouterr().out


@pytest.mark.parametrize("place", ["{file}", "/proc/runs", "{link}"])
def test_runs_that_cannot_be_written(refused: Said, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    where = place.format(file=tmp_path / "file", link=tmp_path / "link")
    assert f"runs={where}: " in refused(f"runs={where}")


def test_a_run_of_that_name_is_there(refused: Said, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert "exists; choose another name" in refused("name=mine")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, None], ids=["a pipe", "a directory", "nothing"])
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["run", PIPELINE, "data.train={}"], ".jsonl"),
        (["run", PIPELINE, "custom_reward_function.path={}"], ".py"),
        (["run", PIPELINE, "reward.manager=mine", "reward.manager_path={}"], ".py"),
        (["run", PIPELINE, "tools.path={}", "tools.names=[x]"], ".py"),
        (["run", "{}"], ".py"),
        (["timeline", "{}"], ".gz"),
    ],
)
def test_a_path_that_leads_to_no_file(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    make: Callable[[Path], None] | None,
    arguments: list[str],
    kind: str,
) -> None:
    """A pipe that is opened would block for ever."""
    path = tmp_path / f"mine{kind}"
    if make is not None:
        make(path)
    assert main([text.format(path) for text in arguments]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert f"{path}" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "engine.temperature=1e-45",
            "engine.temperature=1e-45: the logits divided by it are infinite; give 0 (greedy)",
        ),
        ("val.temperature=1e-7", "val.temperature=1e-07: the logits divided by it are infinite; give 0 (greedy)"),
        ("resume.allow=[polcy]", "resume.allow=[polcy]: unknown key 'polcy'; did you mean 'policy'?"),
        ("resume.allow=[policy,lr]", "resume.allow=[lr]: unknown key 'lr'; did you mean 'trainer.lr'?"),
    ],
)
def test_settings_that_cannot_take_effect(refused: Said, arguments: str, message: str) -> None:
    keys = re.split(r" (?=\w+[.=])", arguments)
    assert message in refused("engine.rollout=hf", *keys)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Files that look like a model's."""
    path = tmp_path / "model"
    path.mkdir()
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 8,
        "max_position_embeddings": 32,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    save_file({"model.norm.weight": np.zeros(4, np.float32)}, path / "model.safetensors")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b"{}", "it is a model without architectures"),
        ("config.json", b'{"model_type": "bert", "architectures": ["BertModel"]}', "does not write: it is a BertModel"),
        ("config.json", None, "has no config.json"),
        ("model.safetensors", None, "cannot be read (No such file"),
        ("model.safetensors", b"", "cannot be read"),
    ],
)
def test_a_model_that_is_not_whole(refused: Said, model: Path, name: str, content: bytes | None, message: str) -> None:
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    before = set(sys.modules)
    assert message in refused(f"model.path={model}")
    assert not {"torch", "transformers", "ray", "vllm"} & (set(sys.modules) - before), "it is said before these load"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["engine.max_tokens=32", "engine.rollout=hf"], "more than the 32 tokens that model"),
        (["tools.names=[calculator]", "tools.max_response_tokens=32", "engine.rollout=hf"], "max_response_tokens=32"),
    ],
)
def test_a_response_that_does_not_fit_into_the_model(
    refused: Said, model: Path, arguments: list[str], message: str
) -> None:
    assert message in refused(f"model.path={model}", *arguments)


def test_a_response_that_does_not_fit_into_vllm(refused: Said, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataflow.engines.choice.vllm_device", lambda: "cpu")
    said = refused(f"model.path={model}", "engine.rollout=vllm", "engine.max_tokens=8", "data.max_prompt_length=32")
    assert "data.max_prompt_length=32 and engine.max_tokens=8 are together more than the 32 tokens" in said


@pytest.mark.parametrize("out", ["{gone}/x{kind}", "{folder}{kind}"])
@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (["plan", "{source}"], ".html"),
        (["timeline", "{source}"], ".txt"),
        (["compare", "{source}", "{source}"], ".svg"),
        (["compare", PIPELINE], ".html"),
        (["show", PIPELINE], ".mmd"),
    ],
)
def test_an_out_that_cannot_be_written_is_said_before_the_work(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], kind: str, out: str
) -> None:
    (tmp_path / f"folder{kind}").mkdir()
    where = out.format(kind=kind, gone=tmp_path / "gone", folder=tmp_path / "folder")
    # The source is not there: a command that looked at it first would say so.
    code = main([part.format(source=tmp_path / "no-run") for part in command] + ["-o", where])
    err = capsys.readouterr().err
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert "-o " in err
    assert "no-run" not in err
    assert [path.name for path in tmp_path.iterdir()] == [f"folder{kind}"]


COSTS = """
steps: 4
prompts: 8
responses: 4
mini_batches: 4
stages: {rollout: 10, actor_update: 8}
reward: {latency: 20, concurrency: 8}
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("steps=1000000000", "less than or equal to 100000"),
        ("reward.latency=lognormal:1:800", "SIGMA from 0 to 20"),
    ],
)
def test_a_plan_that_would_not_end_or_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argument: str, message: str
) -> None:
    (tmp_path / "costs.yaml").write_text(COSTS)
    assert main(["plan", str(tmp_path / "costs.yaml"), argument]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert message in err
