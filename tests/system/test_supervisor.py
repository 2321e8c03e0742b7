"""The process above a run: however the run ends, one sentence is printed and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.rigs.processes import marked

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(sys.platform != "linux", reason="pidfds and subreapers")]

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, signal, subprocess, sys, time
from pathlib import Path
from dataflow.system import supervisor
from dataflow.running.record import finish_killed

HERE, WHAT = Path(sys.argv[1]), sys.argv[2]
run = HERE / "run"
supervisor.CLOSING_S = supervisor.STARTING_S = float(sys.argv[3])

def sleeper(*, orphan):
    # In a session of its own; an orphan if its parent has ended.
    child = subprocess.Popen(["sh", "-c", "setsid sleep 600 & " + ("" if orphan else "wait")], start_new_session=True)
    if orphan:
        child.wait()

def ready():
    print(os.getpid(), flush=True)

def work():
    run.mkdir()
    supervisor.report(directory=str(run), steps=7)
    for name in ("file", "directory", "gone"):
        supervisor.report(temporary=str(HERE / name))
    (HERE / "file").touch()
    (HERE / "directory").mkdir()
    if WHAT != "alone":
        sleeper(orphan=True)
        sleeper(orphan=False)
    if WHAT == "returns":
        return 5
    if WHAT == "raises":
        raise ValueError("a bug")
    if WHAT == "exits":
        os._exit(1)
    if WHAT == "aborts":
        os.abort()
    if WHAT == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    try:
        ready()
        time.sleep(600)
    finally:
        if WHAT in ("closes", "alone"):
            time.sleep(0.5)
            print("closed", flush=True)

sys.exit(supervisor.supervise(work, finish_killed))
"""


class Command:
    """A supervised program, and the processes that it started."""

    def __init__(self, here: Path, what: str, closing_s: float = 30.0, before: str = "") -> None:
        (here / "program.py").write_text(PROGRAM)
        command = [sys.executable, str(here / "program.py"), str(here), what, str(closing_s)]
        if before:
            command = [before, *command]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SUPERVISED": str(here)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, process_group=0
        )
        self.here = here

    def ready(self) -> int:
        """Returns the child's process id."""
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())

    def ends(self) -> tuple[int, str, str]:
        """Returns exit code, output and errors; nothing may be left."""
        out, err = self.process.communicate(timeout=40)
        assert not self.left()
        return self.process.returncode, out, err

    def left(self) -> list[psutil.Process]:
        """Returns the processes of the program, however they were orphaned, that do not end within 5 s."""
        return psutil.wait_procs(list(marked("SUPERVISED", str(self.here))), timeout=5)[1]


@pytest.fixture
def commands() -> Iterator[list[Command]]:
    begun: list[Command] = []
    yield begun
    for command in begun:
        for process in command.left() if command.process.poll() is None else ():
            process.kill()
        command.process.communicate()


def status(here: Path) -> str:
    return str(json.loads((here / "run" / "summary.json").read_text())["status"])


@pytest.mark.slow
def test_what_the_run_returns_and_raises_is_passed_on(tmp_path: Path, commands: list[Command]) -> None:
    commands += [Command(path, what) for what in ("returns", "raises") if (path := tmp_path / what).mkdir() is None]
    code, _out, err = commands[0].ends()
    assert (code, err) == (5, "")
    code, _out, err = commands[1].ends()
    assert code == 1
    assert err.endswith("ValueError: a bug\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "words"), [("exits", "ended with exit code 1"), ("aborts", "SIGABRT"), ("sleeps", "killed by SIGKILL")]
)
def test_a_run_that_dies_is_reported_in_one_sentence(
    tmp_path: Path, commands: list[Command], what: str, words: str
) -> None:
    command = Command(tmp_path, what)
    commands.append(command)
    if what == "sleeps":
        os.kill(command.ready(), signal.SIGKILL)
    code, _out, err = command.ends()
    assert code == 1
    assert err.startswith("RunError: the run's process ")
    assert "Ray" not in err  # it was not started
    assert words in err
    assert "stopped after 0 of 7 steps" in err
    assert len(err.splitlines()) == 1
    assert status(tmp_path) == "failed"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["program.py", "run"], "temporary files are removed"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "whole"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGHUP, True)])
def test_a_signal_ends_the_run_once(
    tmp_path: Path, commands: list[Command], number: signal.Signals, whole: bool
) -> None:
    command = Command(tmp_path, "closes")
    commands.append(command)
    command.ready()
    (os.killpg if whole else os.kill)(command.process.pid, number)
    code, out, err = command.ends()
    assert (code, out) == (128 + number, "closed\n"), "a signal that comes twice must not cut the closing off"
    assert err.strip() == "interrupted"
    assert status(tmp_path) == "interrupted"


@pytest.mark.parametrize("how", ["deadline", "second signal"])
def test_a_run_that_does_not_end_is_ended(tmp_path: Path, commands: list[Command], how: str) -> None:
    command = Command(tmp_path, "deaf", closing_s=0.3 if how == "deadline" else 30.0)
    commands.append(command)
    command.ready()
    command.process.send_signal(signal.SIGTERM)
    if how != "deadline":
        time.sleep(0.5)  # until then it is taken for the same signal
        command.process.send_signal(signal.SIGINT)
    code, _out, err = command.ends()
    assert code == 143
    again = "'dataflow run' with name=run and resume=auto begins it again"
    assert err.strip() == f"interrupted: stopped after 0 of 7 steps; {again}; its files are in {tmp_path / 'run'}"
    assert status(tmp_path) == "interrupted"


def test_a_supervisor_that_is_killed_takes_the_run_along(tmp_path: Path, commands: list[Command]) -> None:
    command = Command(tmp_path, "alone")
    commands.append(command)
    command.ready()
    command.process.kill()
    code, out, _err = command.ends()
    assert (code, out) == (-signal.SIGKILL, "closed\n")


def test_under_nohup_a_closed_terminal_changes_nothing(tmp_path: Path, commands: list[Command]) -> None:
    command = Command(tmp_path, "closes", before="nohup")
    commands.append(command)
    command.ready()
    os.killpg(command.process.pid, signal.SIGHUP)
    os.killpg(command.process.pid, signal.SIGTERM)
    assert command.ends()[0] == 143
