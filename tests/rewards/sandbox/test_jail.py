"""The process around a program: what it reports, and what it forbids and limits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from dataflow.rewards.sandbox.calls import filter_of
from dataflow.rewards.sandbox.jail import usage
from tests.rigs.processes import left, until

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="the jail is made of Linux's system calls"),
]

FOREVER = "import time\ntime.sleep(1000)\n"
JAIL = "import sys; from dataflow.rewards.sandbox.jail import main; main.main()"
REFUSED = """
import errno, sys
from dataflow.rewards.sandbox.jail import main
def refused(options): raise PermissionError(errno.EPERM, "Operation not permitted")
main.separate = refused
main.main()
"""


def started(code: str, *arguments: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
    """Starts a process whose Python code changes it for good."""
    return subprocess.Popen([sys.executable, "-c", code, *arguments], pass_fds=pass_fds, stdout=PIPE, text=True)


def printed(code: str, *arguments: str) -> Any:
    """Returns what such code prints as JSON."""
    with started(code, *arguments) as process:
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    return json.loads(out)


class Jail:
    """A jail without namespaces around a program."""

    def __init__(self, place: Path, source: str, jail: str = JAIL, **options: Any) -> None:
        self.work = place / "sandbox-1" / "work"
        self.work.mkdir(parents=True)
        reader, writer = os.pipe()
        self.report = os.fdopen(reader)
        with tempfile.TemporaryFile() as code:
            code.write(source.encode())
            code.flush()
            self.options = {
                "parent": os.getpid(), "report": writer, "code": f"/proc/{os.getpid()}/fd/{code.fileno()}",
                "work": str(self.work), "command": [sys.executable, "-I", "-S", "main.py"], "environment": {},
                "timeout": 30.0, "latest": 60.0, "calls": filter_of(os.uname().machine), "guarded": [],
                "memory_mb": 1 << 12, "disk_mb": 8, "files": 64, "processes": 4, "threads": 8, "isolate": False,
                **options,
            }  # fmt: skip
            self.process = started(jail, json.dumps(self.options), pass_fds=[writer])
            os.close(writer)
            self.first = json.loads(self.report.readline())

    def end(self) -> dict[str, Any]:
        """Returns what the jail reports at its end."""
        with self.report:
            found = json.loads(self.report.readline())
        assert self.process.wait(20) == 0
        return dict(found)


@pytest.fixture
def jail(tmp_path: Path) -> Iterator[Any]:
    made: list[Jail] = []

    def make(source: str, **options: Any) -> Jail:
        made.append(Jail(tmp_path, source, **options))
        return made[-1]

    yield make
    for each in made:
        each.process.kill()
        each.process.communicate()


def test_the_exit_code_is_reported_and_the_folder_stays_for_who_started_it(jail: Any) -> None:
    mine = jail("open('made', 'w').write('1')\nraise SystemExit(3)")
    assert mine.first["missing"] == "switched off"
    assert mine.end() == {"end": "exit", "code": 3}
    assert sorted(each.name for each in mine.work.iterdir()) == ["made", "main.py"]


def test_namespaces_that_the_system_refuses_are_reported(jail: Any) -> None:
    mine = jail("", jail=REFUSED, isolate=True, calls=None)
    assert mine.first["missing"] == "[Errno 1] Operation not permitted"
    assert mine.first["unfiltered"] == f"their numbers on {os.uname().machine} are not known"
    assert mine.end() == {"end": "exit", "code": 0}


def test_a_program_that_cannot_be_started_is_an_error(jail: Any) -> None:
    found = jail("", command=["/no/such/python"]).end()
    assert found == {"end": "error", "why": "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/python'"}


def test_a_program_that_sleeps_too_long_ends_with_what_it_has_started(jail: Any, tmp_path: Path) -> None:
    mine = jail(
        f"import os\nif os.fork() == 0: os.setsid()\nopen(str(os.getpid()), 'w')\n{FOREVER}", timeout=0.3, latest=0.3
    )
    assert mine.end() == {"end": "timeout"}
    pids = [int(each.name) for each in mine.work.iterdir() if each.name.isdigit()]
    assert len(pids) == 2
    assert left(pids, 0) == []


@pytest.mark.parametrize(
    ("source", "limits", "end"),
    [
        ("import os\nfor _ in range(4): os.fork()\n", {"processes": 2, "threads": 64}, "process_limit"),
        ("import threading, time\nfor _ in range(4): threading.Thread(target=time.sleep, args=(1000,)).start()\n",
         {"threads": 2}, "process_limit"),
        ("import os\nos.fork()\nos.fork()\na = b'a' * (48 << 20)\n", {"memory_mb": 128}, "memory_limit"),
    ],
)  # fmt: skip
def test_limits_of_all_processes_together(jail: Any, source: str, limits: dict[str, int], end: str) -> None:
    assert jail(source + FOREVER, **limits).end() == {"end": end}


def test_a_jail_that_is_cancelled_removes_the_folder(jail: Any) -> None:
    mine = jail(f"open('began', 'w')\n{FOREVER}")
    assert until((mine.work / "began").exists, 20)
    os.kill(mine.process.pid, signal.SIGTERM)
    assert mine.end() == {"end": "cancelled"}
    assert not mine.work.parent.exists()


def test_a_signal_of_another_process_does_not_cancel_a_program(jail: Any) -> None:
    mine = jail("import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nraise SystemExit(5)", calls=None)
    assert mine.end() == {"end": "exit", "code": 5}


def test_a_jail_whose_parent_has_ended_runs_nothing(tmp_path: Path) -> None:
    (work := tmp_path / "sandbox-1" / "work").mkdir(parents=True)
    reader, writer = os.pipe()

    options = {"parent": 1, "report": writer, "work": str(work)}
    with started(JAIL, json.dumps(options), pass_fds=[writer]) as process:
        assert process.wait(20) == 0
    os.close(writer)
    with os.fdopen(reader) as report:
        assert report.read() == ""
    assert not work.parent.exists()


ATTEMPTS = """
import errno, json, os, socket, sys
from pathlib import Path
from dataflow.rewards.sandbox.calls import filter_of
from dataflow.rewards.sandbox.jail import rights

def attempt(act):
    try:
        act()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"

guarded = int(sys.argv[1])
rights.drop_privileges()
rights.forbid(filter_of(os.uname().machine) or {}, [guarded])
print(json.dumps([
    attempt(lambda: os.kill(guarded, 0)),
    attempt(lambda: os.kill(os.getpid(), 0)),
    attempt(lambda: socket.socket(socket.AF_UNIX).close()),
    attempt(lambda: os.close(os.memfd_create("text"))),
    attempt(lambda: Path("/proc/self/stat").read_text()),
]))
"""


def test_a_filter_forbids_calls_for_good() -> None:
    others, own, connects, takes, reads = printed(ATTEMPTS, str(os.getpid()))
    assert (own, reads) == ("done", "done")
    assert "done" not in (others, connects, takes)


LIMITED = """
import json, resource, sys
from dataflow.rewards.sandbox.jail import rights

resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))  # lower than what is asked for
rights.limit(json.loads(sys.argv[1]), False)
kinds = (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)
print(json.dumps([min(resource.getrlimit(kind)[1], 1 << 40) for kind in kinds]))
"""


def test_each_process_is_limited_as_far_as_it_may_be() -> None:
    options = {"latest": 10.0, "threads": 1, "memory_mb": 1 << 14, "disk_mb": 8, "files": 64}
    assert printed(LIMITED, json.dumps(options)) == [12, 1 << 34, 4 << 20, 64]


def test_what_processes_use_is_found_until_they_have_ended() -> None:
    program = subprocess.Popen(["sleep", "60"])
    try:
        assert program.pid in usage.descendants(False)
        own = f"/proc/{program.pid}"
        assert until(lambda: usage.memory(own) >= usage.part(own) > 0, 20)
        assert usage.thread(program.pid, usage.stat(program.pid)) == own
        limits = {"processes": 1000, "threads": 1000, "memory_mb": 1 << 20}
        assert usage.excess(limits, False) == ""
        assert usage.excess({**limits, "memory_mb": 0}, False) == "memory_limit"
        assert usage.excess({**limits, "threads": 0}, False) == "process_limit"
        assert usage.excess({**limits, "processes": 0}, False) == "process_limit"
    finally:
        program.kill()
        os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOWAIT)
    assert program.pid not in usage.descendants(False), "a zombie"
    assert usage.thread(program.pid, usage.stat(program.pid)) == own
    program.wait()
    assert (usage.stat(program.pid), usage.memory(own), usage.part(own)) == ([], 0, 0)
    assert usage.ended_by_system() >= 0
