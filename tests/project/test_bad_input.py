"""Input that is wrong in every way we know of: exit code 2, one sentence, nothing left behind and nothing started.

Nothing here needs torch or Ray: each case is refused before they are imported.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["judge.url=[http://a,http://b]"], "is not an address; give http://host:port"),
        (["steps"], "write it so, such as steps=5"),
        (["steps", "5"], "is not key=value"),
        (["--policy", "both"], "keys are written without dashes"),
        (["-x"], "unrecognized arguments: -x"),
        (["engine.temperature=1e-45"], "the logits divided by it are infinite; give 0 (greedy)"),
    ],
)
def test_arguments_that_are_wrong(refused: Said, arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


@pytest.mark.parametrize("arguments", [[], ["flee"], ["run"], ["plan", "--port", "1"]])
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


@pytest.mark.parametrize("place", ["{file}", "/proc/runs"])
def test_runs_that_cannot_be_written(refused: Said, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    where = place.format(file=tmp_path / "file")
    assert f"runs={where}: " in refused(f"runs={where}")


def test_a_run_of_that_name_is_there(refused: Said, tmp_path: Path) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    assert "exists; choose another name" in refused("name=mine")


@pytest.mark.parametrize("make", [Path.mkdir, None], ids=["a directory", "nothing"])
@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (["run", PIPELINE, "data.train={}"], ".jsonl"),
        (["run", PIPELINE, "custom_reward_function.path={}"], ".py"),
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
    path = tmp_path / f"mine{kind}"
    if make is not None:
        make(path)
    assert main([text.format(path) for text in arguments]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert f"{path}" in err


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
        ("config.json", b"{}", "is a model without architectures"),
        ("config.json", None, "config.json cannot be read"),
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
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str], kind: str
) -> None:
    where = str(tmp_path / "gone" / f"x{kind}")
    # The source is not there: a command that looked at it first would say so.
    code = main([part.format(source=tmp_path / "no-run") for part in command] + ["-o", where])
    err = capsys.readouterr().err
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert "-o " in err
    assert "no-run" not in err
    assert list(tmp_path.iterdir()) == []
