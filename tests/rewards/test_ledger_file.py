"""The ledger's file: invalid paths, disks that fail, processes that die or share it."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import ConfigError, RunError
from dataflow.rewards.ledger import Answer, Ledger, key_of

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(60)]


ANSWER = Answer(0.5, {"explanation": "it is right"}, 0.25, 2)
A, B = bytes(16), bytes([1] * 16)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


def resumed(path: Path, *rows: tuple[int, int, bytes]) -> Any:
    """What another process would get of step 1."""
    with closing(Ledger(path)) as ledger:
        return ledger.submitted(1, rows)


def one(path: Path) -> None:
    with closing(Ledger(path)) as ledger:
        ledger.answered(1, 0, 0, A, ANSWER)


def test_files_that_are_no_ledger(path: Path) -> None:
    def refused(file: Path, why: str) -> None:
        with pytest.raises(ConfigError, match=why) as error:
            Ledger(file)
        assert str(file) in str(error.value)

    refused(path.parent, "unable to open database file")
    refused(Path("/proc/ledger.db"), "unable to open")
    path.write_text("step,score\n" * 1000)
    refused(path, "file is not a database")


def test_a_file_that_is_removed(path: Path) -> None:
    ledger = Ledger(path)
    for file in path.parent.iterdir():
        file.unlink()
    ledger.answered(1, 0, 0, A, ANSWER)
    for call in (
        lambda: ledger.flush(),
        lambda: ledger.submitted(1, [(0, 0, A)]),
        lambda: ledger.answered(1, 0, 1, B, ANSWER),
        lambda: ledger.failed(1, 0, 1, B, "reset"),
        lambda: ledger.close(),
    ):
        with pytest.raises(RunError, match="it was removed during the run"):
            call()
    ledger.close()


# Other processes.


def program(code: str, *arguments: object) -> list[str]:
    head = "import os, sys, time\nfrom dataflow.rewards.ledger import Answer, Ledger, key_of\npath = sys.argv[1]\n"
    return [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)]


def test_a_killed_process_leaves_what_was_committed(path: Path) -> None:
    code = """
        ledger = Ledger(path)
        for group in range(20_000):
            key = key_of({"solution_str": str(group)})
            ledger.submitted(1, [(group, 0, key)])
            ledger.answered(1, group, 0, key, Answer(group, {"group": group}, 0.1, 1))
            if group == 50:
                ledger.flush()
                print("flushed", flush=True)
    """
    with subprocess.Popen(program(code, path), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"flushed\n"
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait(timeout=20) == -signal.SIGKILL
    rows = [(group, 0, key_of({"solution_str": str(group)})) for group in range(20_000)]
    found = resumed(path, *rows)
    assert len(found) >= 51
    # Nothing in between is missing, and nothing is mixed up.
    assert list(found) == [(group, 0) for group in range(len(found))]
    assert all(answer == Answer(group, {"group": group}, 0.1, 1) for (group, _), answer in found.items())
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_process_that_ends_without_close_loses_nothing(path: Path) -> None:
    code = """
        ledger = Ledger(path)
        for group in range(500):
            ledger.answered(1, group, 0, bytes(16), Answer(group, {}, 0.1, 1))
        raise SystemExit(3)
    """
    assert subprocess.run(program(code, path), timeout=50).returncode == 3
    assert len(resumed(path, *[(group, 0, bytes(16)) for group in range(500)])) == 500


def test_a_full_disk_is_said(path: Path) -> None:
    code = """
        import resource
        from dataflow.errors import RunError
        ledger = Ledger(path)
        ledger.answered(1, 0, 0, bytes(16), Answer(7, {}, 0.1, 1))
        ledger.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
        told = 1
        try:
            while told < 100_000:
                ledger.answered(1, told, 0, bytes(16), Answer(7, {"text": "x" * 1000}, 0.1, 1))
                told += 1
                if told % 100 == 0:
                    ledger.flush()
        except RunError as error:
            print(told, error)
        try:
            ledger.close()
        except RunError as error:
            print(error)
    """
    done = subprocess.run(program(code, path), stdout=subprocess.PIPE, text=True, timeout=50)
    assert done.returncode == 0
    first, last = done.stdout.splitlines()
    assert "it cannot be written" in first
    assert first.split(" ", 1)[1] == last
    told = int(first.split()[0])
    assert len(resumed(path, *[(group, 0, bytes(16)) for group in range(told)])) >= 100
