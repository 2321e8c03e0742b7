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


class _Panic(BaseException):
    """What an extension module may raise when its import is interrupted."""


@pytest.mark.parametrize("kind", [_Panic])
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
