"""The weights of an engine that is killed are removed by a process that outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from dataflow.engines.servers import weights_remover
from dataflow.engines.servers.weights_files import MARKER, remove_weights
from dataflow.engines.servers.weights_remover import WeightsRemover
from tests.rigs.processes import until

pytestmark = pytest.mark.timeout(60)

ENGINE = """
import os, sys, time
from pathlib import Path
from dataflow.engines.servers.weights_remover import WeightsRemover
remover = WeightsRemover(Path(sys.argv[1]), "one")
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with weights of the engine 'one'."""
    (tmp_path / "w" / "version-1-abcdef").mkdir(parents=True)
    (tmp_path / "w" / "version-1-abcdef" / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "w" / MARKER).write_text("one")
    return tmp_path / "w"


@pytest.mark.slow
def test_an_engine_that_is_killed_with_its_process_group_leaves_no_weights(place: Path) -> None:
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(place)], stdout=subprocess.PIPE, start_new_session=True
    )
    with engine:
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"\n"
        os.killpg(engine.pid, signal.SIGKILL)
    assert until(lambda: not place.exists(), 30)


def test_what_a_later_engine_has_taken_over_stays(place: Path) -> None:
    (place / MARKER).write_text("two")
    remover = WeightsRemover(place, "one")
    remover.close()
    remover.close()
    assert (place / "version-1-abcdef").is_dir()


def test_an_engine_that_closes_waits_until_its_weights_are_removed(place: Path) -> None:
    remover = WeightsRemover(place, "one")
    assert (place / "version-1-abcdef").is_dir()
    (place / "note").write_text("mine")
    remover.close()
    assert {file.name for file in place.iterdir()} == {"note", MARKER}
    remove_weights(place, "one")
    assert (place / "note").exists()


def test_an_engine_whose_process_was_killed_removes_its_weights(place: Path) -> None:
    remover = WeightsRemover(place, "one")
    for process in psutil.process_iter(["cmdline"]):
        if str(place) in (process.info["cmdline"] or ()):
            process.kill()
    remover.close()
    assert not place.exists()


@pytest.mark.parametrize("words", [["false"], ["/no/such/program"]])
def test_a_process_that_does_not_start_is_reported(
    words: list[str], place: Path, warned: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_remover, "command", lambda *_: words)
    WeightsRemover(place, "one").close()
    assert "if this one is killed did not start" in warned[0]
    assert not place.exists()
