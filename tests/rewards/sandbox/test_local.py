"""Programs on this machine: whatever one does, its end is known, its processes end, and nothing outside changes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dataflow.rewards.sandbox import local
from dataflow.rewards.sandbox.jail.namespaces import DEVICES
from dataflow.rewards.sandbox.local import LocalSandbox
from dataflow.rewards.sandbox.outcome import Outcome, SandboxError
from tests.rigs.logs import logged
from tests.rigs.processes import below, command, left

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LONG = 60.0
"""Seconds that no test waits for: a limit other than time ends the program."""
FOREVER = "import time\ntime.sleep(1000)\n"


def namespaces() -> bool:
    """Whether this system lets a user make them."""
    try:
        return subprocess.run(["unshare", "-Urnpm", "true"], capture_output=True, timeout=20).returncode == 0
    except FileNotFoundError:
        return False


needs_namespaces = pytest.mark.skipif(not namespaces(), reason="this system gives no namespaces to a user")


@pytest.fixture(params=[pytest.param(True, marks=needs_namespaces), False], ids=["namespaces", "limits"])
def isolate(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test's programs have ended, and their files are gone, when it ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    programs = [each for each in below() if any(word == "main.py" or "jail.main" in word for word in command(each))]
    assert left(programs, 0) == []
    assert list(tmp_path.glob("sandbox-*")) == []


def run(source: str, stdin: str = "", isolate: bool = True, timeout: float = LONG) -> Outcome:
    """Returns how a program ended."""
    box = LocalSandbox(timeout, 512, isolate=isolate)
    return asyncio.run(asyncio.wait_for(box.run(source, stdin), 90))


def test_it_reads_its_input_and_writes_its_output(isolate: bool) -> None:
    outcome = run("import sys\nprint(input(), len(sys.stdin.read()))", "wörld 世\n" + "a" * 10**6, isolate)
    assert outcome == Outcome("finished", "wörld 世 1000000\n")


def test_an_input_that_is_not_read_and_surrogates_do_no_harm(isolate: bool) -> None:
    assert run("print(1)", "a" * 10**6 + "\ud800", isolate) == Outcome("finished", "1\n")


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("import sys\nprint('a', flush=True)\nsys.exit(3)", "runtime_error", ""),
        ("1 / 0", "runtime_error", "ZeroDivisionError"),
        ("def", "runtime_error", "SyntaxError"),
        ("print(1)\0", "runtime_error", "null bytes"),
        ("print('\ud800')", "runtime_error", ""),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "runtime_error", ""),
        ("x = []\nwhile True: x.append(bytearray(10**7))", "runtime_error", "MemoryError"),
        ("import os\nwhile True: os.write(1, b'x' * 10**5)", "output_limit", ""),
        ("import os\nfor _ in range(500): os.write(2, b'y' * 10**5)\nprint(1)", "finished", "y" * 2000),
        ("f = open('a', 'wb')\nwhile True: f.write(b'0' * 10**6)", "runtime_error", "OSError"),
        ("open('a', 'w').write('b')\nassert open('a').read() == 'b'", "finished", ""),
        ("f = [open('/dev/null') for _ in range(1000)]", "runtime_error", "Too many open files"),
        # Children that take the memory that the parent may not.
        (
            "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(10**8)\n"
            "        time.sleep(1000)\ntime.sleep(1000)",
            "memory_limit",
            "",
        ),
        (
            "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(1000)\ntime.sleep(1000)",
            "process_limit",
            "",
        ),
    ],
    ids=lambda value: value if str(value).isidentifier() else "",
)
def test_how_a_program_ends_is_known(isolate: bool, source: str, status: str, said: str) -> None:
    outcome = run(source, "", isolate)
    assert outcome.status == status, outcome
    assert said in outcome.stderr


@pytest.mark.parametrize("source", ["while True: pass", FOREVER, "import os\nos.fork()\nwhile True: pass"])
def test_one_that_does_not_end_is_ended(isolate: bool, source: str) -> None:
    assert run(source, "", isolate, timeout=0.5).status == "timeout"


def test_one_that_closes_its_output_is_still_waited_for(isolate: bool) -> None:
    assert run("import os\nos.close(1); os.close(2)\n" + FOREVER, "", isolate, timeout=0.5).status == "timeout"


def test_what_it_leaves_running_ends_with_it(isolate: bool) -> None:
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        for _ in range(1000): time.sleep(1)\n    os._exit(0)\nprint('parent')"
    )
    assert run(daemon, "", isolate) == Outcome("finished", "parent\n")


@needs_namespaces
def test_a_fork_bomb() -> None:
    source = f"import os\nfor _ in range(7):\n    try: os.fork()\n    except OSError: pass\n{FOREVER}"  # at most 128
    assert run(source).status == "process_limit"


def test_threads_count_as_processes_do(isolate: bool) -> None:
    source = "import threading, time\nthreading.stack_size(65536)\nfor _ in range(100):\n    "
    outcome = run(f"{source}threading.Thread(target=time.sleep, args=(1000,)).start()\n{FOREVER}", "", isolate)
    # Other users than root are refused the next thread by the system.
    assert outcome.status == "process_limit" or "can't start new thread" in outcome.stderr, outcome


QUEUED = """
import ctypes, struct
def parent(pid): return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
sent = struct.pack("iiiiiI", 15, 0, -1, 0, parent(os.getppid()), 0).ljust(128, bytes(1))
ctypes.CDLL(None).syscall(129, os.getppid(), 15, sent)
"""
"""Sends a signal that names another sender (on x86-64; elsewhere this is another call, or none)."""


SIGNALS = [*(f"os.kill(os.getppid(), {number})" for number in (2, 15, 17, 40)), QUEUED]
FORBIDDEN = [
    "os.killpg(os.getppid(), 9)",
    "import resource\nresource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))",
    "import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())\nfcntl.fcntl(1, 10, 9)",
]


@pytest.mark.parametrize(
    ("filtered", "attempt"), [*((False, each) for each in SIGNALS), *((True, each) for each in SIGNALS + FORBIDDEN)]
)
def test_what_it_does_to_the_process_around_it_is_no_failure_of_the_sandbox(
    isolate: bool, filtered: bool, attempt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not filtered:
        monkeypatch.setattr(local, "filter_of", lambda _machine: None)
    done = f"import os, time\ntry:\n    {attempt.strip().replace(chr(10), chr(10) + '    ')}\nexcept OSError: pass\n"
    assert run(f"{done}time.sleep(0.1)\nprint(1)", "", isolate) == Outcome("finished", "1\n")


def test_it_may_end_itself(isolate: bool) -> None:
    for number in (signal.SIGKILL, signal.SIGXCPU):
        assert run(f"import os\nos.kill(os.getpid(), {number})", "", isolate).status == "runtime_error"


HEADLESS = f"""
import ctypes, os, threading, time
def take():
    taken = b"a" * (200 << 20)
    time.sleep(1000)
def child(act):
    if os.fork() == 0:
        os.setsid()
        threading.Thread(target=act).start()
        ctypes.CDLL(None).syscall({60 if os.uname().machine == "x86_64" else 93}, 0)
"""
"""Starts processes whose main thread ends, and another does not."""


@pytest.mark.parametrize(
    ("source", "status"),
    [
        (f"{HEADLESS}for _ in range(3): child(take)\n{FOREVER}", "memory_limit"),
        (f"{HEADLESS}child(lambda: time.sleep(1000))", "finished"),  # it keeps the output, too
    ],
)
def test_a_process_whose_main_thread_has_ended_is_one_all_the_same(isolate: bool, source: str, status: str) -> None:
    assert run(source, "", isolate) == Outcome(status)  # type: ignore[arg-type]


def test_memory_that_processes_share_counts_once(isolate: bool) -> None:
    source = """
import os, time
taken = b"a" * (200 << 20)
left, right = os.pipe()
for _ in range(6):
    if os.fork() == 0:
        os.close(right)
        os.read(left, 1)
        os._exit(0)
time.sleep(0.3)  # several looks
"""
    assert run(source, "", isolate) == Outcome("finished")


def test_it_has_no_privileges_and_locks_nothing(tmp_path: Path) -> None:
    """Not of root either; a lock of a file, which it may open to read, would stop others."""
    file = tmp_path / "file"
    file.write_text("a")
    outcome = run(
        f"""
import ctypes, fcntl, os, sqlite3
print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapPrm", "CapEff"))])
file = open({str(file)!r})
fcntl.flock(file, fcntl.LOCK_EX)
fcntl.lockf(file, fcntl.LOCK_EX)
library = ctypes.CDLL(None)
for attempt in (lambda: os.nice(1), lambda: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)):
    try:
        print("done", attempt())
    except PermissionError:
        print("denied")
print(library.mq_open(b"/a", 0o100, 0o600, None), library.semget(0, 1, 0o1600))
sqlite3.connect("a.db").execute("create table a (b)")
""",
        isolate=False,
    )
    assert outcome.stdout.splitlines() == [str(["0" * 16] * 2), "denied", "denied", "-1 -1"], outcome


def test_system_calls_that_no_other_limit_stops_are_forbidden(isolate: bool) -> None:
    """Sockets, memory that is not counted, and namespaces of its own; what programs need works."""
    outcome = run(
        """
import asyncio, ctypes, multiprocessing, os, socket, subprocess
library = ctypes.CDLL(None, use_errno=True)
for attempt in (lambda: socket.socket(socket.AF_UNIX), lambda: os.memfd_create("a")):
    try:
        print(attempt())
    except PermissionError:
        print("denied")
print(library.shmget(0, 1 << 20, 0o1600), library.unshare(0x10000000), ctypes.get_errno())
async def echo():
    process = await asyncio.create_subprocess_exec("echo", "a", stdout=-1)
    return await process.communicate()
print(asyncio.run(echo()))
with multiprocessing.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]))
""",
        isolate=isolate,
    )
    assert outcome.stdout.splitlines() == ["denied", "denied", "-1 -1 13", "(b'a\\n', None)", "[1, 2]"], outcome


@needs_namespaces
def test_it_sees_few_devices_and_none_of_the_folders_of_services(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    outcome = run(
        f"""
import os
print(os.listdir("/run"), os.path.exists({str(tmp_path / "fifo")!r}))
print(sorted(set(os.listdir("/dev")) - {{"fd", "stdin", "stdout", "stderr", "shm"}}))
open("/dev/null", "w").write("a")
for name in "/proc/sys/kernel/core_pattern", "/proc/1/fd/0", "/proc/1/mem":
    try:
        print(open(name, "a"))
    except OSError as error:
        print(type(error).__name__)
"""
    )
    folders, devices, *settings = outcome.stdout.splitlines()
    assert folders == "[] False"
    assert devices == str(sorted(name for name in DEVICES if Path("/dev", name).exists()))
    assert set(settings) <= {"OSError", "PermissionError", "FileNotFoundError"}, outcome


def test_its_input_is_no_file_that_it_could_write(isolate: bool) -> None:
    source = "import os\nprint(input())\nos.write(os.open('/proc/self/fd/0', os.O_RDWR), b'a')"
    outcome = run(source, "given\n", isolate)
    assert (outcome.status, outcome.stdout) == ("runtime_error", "given\n")


@needs_namespaces
def test_nothing_outside_can_be_reached(tmp_path: Path) -> None:
    """It sees no other process, no address, no variable of this process, and can write nowhere else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run(
            f"""
import ctypes, os, signal, socket, tempfile
print(sorted(os.environ))
print([int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) > 50])
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=5),
    lambda: open({str(tmp_path)!r} + "/file", "w"),
    lambda: open("/run/file", "w"),
    lambda: os.kill({os.getpid()}, signal.SIGTERM),
    lambda: os.mkdir("/tmp/folder"),
):
    try:
        print("done", attempt())
    except OSError as error:
        print(type(error).__name__)
library = ctypes.CDLL(None, use_errno=True)
writable = (ctypes.c_uint64 * 4)(0, 1, 0, 0)
# In namespaces of its own too, which it may make.
print(library.syscall(442, -1, b"/", 0x8000, writable, 32))
library.unshare(0x10020000)
print(library.syscall(442, -1, b"/", 0x8000, writable, 32))
print(os.path.dirname(tempfile.mkstemp()[1]) == os.getcwd() == os.environ["HOME"])
"""
        )
    assert not (tmp_path / "file").exists()
    names, processes, *attempts, mounts, mounts_inside, own = outcome.stdout.splitlines()
    assert outcome.status == "finished", outcome
    assert names == str(
        ["HOME", "LC_ALL", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH", "TMPDIR"]
    )
    assert processes == "[]"
    assert attempts == ["PermissionError", "OSError", "OSError", "ProcessLookupError", "OSError"]
    assert (mounts, mounts_inside, own) == ("-1", "-1", "True")


def test_descriptors_of_this_process_are_not_inherited(isolate: bool) -> None:
    told, tells = os.pipe()
    os.set_inheritable(tells, True)
    opened = "import os\nfound = []\nfor n in range(3, 200):\n    try: os.fstat(n); found.append(n)\n"
    try:
        outcome = run(f"{opened}    except OSError: pass\nprint(found)", "", isolate)
    finally:
        os.close(told)
        os.close(tells)
    assert outcome == Outcome("finished", "[]\n")


def started(pipe: Path) -> str:
    """Returns a program that writes to a pipe, and does not end."""
    return f"import os\nos.write(os.open({str(pipe)!r}, os.O_WRONLY), b'r')\n{FOREVER}"


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pipe may be written on a file system that is read-only, if the folder is not hidden."""
    monkeypatch.setattr(local, "_HIDDEN", ("/dev",))
    path = tmp_path / "ready"
    os.mkfifo(path)
    return path


def first_byte(pipe: Path) -> bytes:
    with pipe.open("rb", buffering=0) as file:
        return file.read(1)


def test_cancelling_ends_it(isolate: bool, pipe: Path) -> None:
    async def body() -> None:
        running = asyncio.ensure_future(LocalSandbox(LONG, 512, isolate=isolate).run(started(pipe), ""))
        async with asyncio.timeout(60):
            assert await asyncio.to_thread(first_byte, pipe) == b"r"
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

    asyncio.run(body())


def test_it_ends_with_the_process_that_started_it(isolate: bool, pipe: Path, tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom dataflow.rewards.sandbox import local\nlocal._HIDDEN = ('/dev',)\n"
        f"asyncio.run(local.LocalSandbox({LONG}, 512, isolate={isolate}).run(sys.argv[1], ''))"
    )
    words = [sys.executable, "-c", code, started(pipe)]
    with subprocess.Popen(words, env={**os.environ, "TMPDIR": str(tmp_path)}) as parent:
        assert first_byte(pipe) == b"r"
        programs = below(psutil.Process(parent.pid))
        assert programs
        parent.send_signal(signal.SIGKILL)
        parent.wait(20)
        assert left(programs, 20) == []


def test_a_failure_of_the_sandbox_is_no_outcome(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken: list[tuple[Callable[[pytest.MonkeyPatch], Any], str]] = [
        (lambda patch: patch.setattr(local, "JAIL", "1 / 0"), "ended without a report"),
        (lambda patch: patch.setattr(sys, "executable", str(tmp_path / "none")), "no process could be started"),
    ]
    for breaks, said in broken:
        with monkeypatch.context() as patch:
            breaks(patch)
            with pytest.raises(SandboxError, match=said) as caught:
                run("print(1)")
            assert caught.value.retry is True


def test_one_warning_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_warned", set())
    with logged() as messages:
        for _ in range(2):
            assert run("print(1)", isolate=False).stdout == "1\n"
    assert len([one for one in messages if "no namespaces of their own" in one]) == 1


def test_programs_in_a_thread_that_is_not_the_main_one() -> None:
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(run("print(1)")))
    thread.start()
    thread.join(60)
    assert found == [Outcome("finished", "1\n")]
