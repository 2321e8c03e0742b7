"""Programs on this machine: whatever one does, its end is known, and its processes end with it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dataflow.errors import ConfigError
from dataflow.rewards.sandbox import local
from dataflow.rewards.sandbox.cases import Outcome, SandboxError
from dataflow.rewards.sandbox.local import LocalSandbox, isolation
from tests.rigs.processes import environment, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

FOREVER = "import time\ntime.sleep(1000)\n"
ISOLATED = local._ISOLATED
LIMITS = ("prlimit", "--core=0", "--")
DAEMON = (
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
    "        for _ in range(1000): time.sleep(1)\n    os._exit(0)\nprint('parent')"
)
"""It leaves a process behind that is in no group of the program's, and holds its output."""


def only(patch: pytest.MonkeyPatch, *names: str) -> None:
    """Leaves some ways to run programs, for boxes that are made from now on."""
    patch.setattr(local, "_ISOLATED", {name: ISOLATED[name] for name in names})
    isolation.cache_clear()


@pytest.fixture(params=["bwrap", "unshare", "rlimits"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = str(request.param)
    only(monkeypatch, name)
    try:
        isolation(LIMITS)
    except ConfigError as error:
        pytest.skip(str(error))
    yield name
    isolation.cache_clear()


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test's programs have ended, and their files are gone, when it ends."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert until(lambda: not programs(tmp_path), 20)
    assert list(tmp_path.glob("sandbox-*")) == []


def programs(place: Path) -> list[psutil.Process]:
    """Returns the running processes of all programs whose folders are below this one."""
    found = []
    for process in psutil.process_iter():
        try:
            if environment(process).get("HOME", "").startswith(f"{place}/sandbox-"):
                found.append(process)
        except psutil.AccessDenied:
            continue  # another user's
    return found


def run(source: str, stdin: str = "") -> Outcome:
    """Returns how a program ended."""
    return asyncio.run(asyncio.wait_for(LocalSandbox(20, 512).run(source, stdin), 90))


ENDS = (
    ("1 / 0", "runtime_error", "ZeroDivisionError"),
    ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "runtime_error", ""),
    ("x = []\nwhile True: x.append(bytearray(10**7))", "memory_limit", "MemoryError"),
    ("import os\nwhile True: os.write(1, b'x' * 10**5)", "output_limit", ""),
    ("import os\nfor _ in range(500): os.write(2, b'y' * 10**5)\nprint(1)", "finished", "y" * 2000),
    ("f = open('a', 'wb')\nwhile True: f.write(b'0' * 10**6)", "runtime_error", "OSError"),
    ("import multiprocessing\nwith multiprocessing.Pool(2) as p: assert p.map(abs, [-1]) == [1]", "finished", ""),
)


def test_how_a_program_ends_is_known(way: str) -> None:
    for source, status, said in ENDS:
        outcome = run(source)
        assert outcome.status == status, (source, outcome)
        assert said in outcome.stderr


def test_one_that_does_not_end_is_ended(way: str) -> None:
    sources = ("while True: pass", f"import os\nos.fork()\n{FOREVER}", f"import os\nos.closerange(0, 9)\n{FOREVER}")

    async def body() -> list[Outcome]:
        box = LocalSandbox(1, 512)
        return await asyncio.gather(*(box.run(source, "") for source in sources))

    assert [outcome.status for outcome in asyncio.run(body())] == ["timeout"] * 3


def test_what_it_leaves_running_ends_with_it(way: str, tmp_path: Path) -> None:
    if way == "rlimits":  # of these only its group
        assert (
            run(f"import os\nif os.fork() == 0:\n    {FOREVER.replace(chr(10), chr(10) + '    ')}").status == "finished"
        )
    else:
        assert run(DAEMON) == Outcome("finished", "parent\n")


def test_its_environment_and_descriptors_are_not_those_of_this_process(way: str) -> None:
    told, tells = os.pipe()
    os.set_inheritable(tells, True)
    os.environ["SECRET"] = "a"
    found = "import os\nfound = [n for n in range(3, 200) if os.path.exists(f'/proc/self/fd/{n}')]\n"
    try:
        assert run(f"{found}print(found, 'SECRET' in os.environ)") == Outcome("finished", "[] False\n")
    finally:
        del os.environ["SECRET"]
        os.close(told)
        os.close(tells)


def test_what_is_isolated(way: str, tmp_path: Path) -> None:
    """What docs/sandbox.md says of the network, of other processes and of files."""
    (tmp_path / "file").write_text("a")
    with socket.create_server(("127.0.0.1", 0)) as server:
        outcome = run(
            f"""
import os, signal, socket
for attempt in (
    lambda: socket.create_connection(("127.0.0.1", {server.getsockname()[1]}), timeout=5),
    lambda: os.kill({os.getpid()}, 0),
    lambda: open("/proc/{os.getpid()}/environ"),
    lambda: open({str(tmp_path)!r} + "/file"),
    lambda: open({str(tmp_path)!r} + "/other", "w"),
):
    try:
        attempt()
        print(True)
    except OSError:
        print(False)
"""
        )
    reached = dict(zip(("network", "processes", "environ", "read", "write"), outcome.stdout.split(), strict=True))
    names = {"bwrap": [], "unshare": ["read", "write"], "rlimits": list(reached)}[way]
    assert [name for name, yes in reached.items() if yes == "True"] == names


def test_cancelling_ends_it(way: str, tmp_path: Path) -> None:
    async def body() -> None:
        running = asyncio.ensure_future(LocalSandbox(60, 512).run(FOREVER, ""))
        assert await asyncio.to_thread(until, lambda: programs(tmp_path), 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(body())


def test_it_ends_with_the_process_that_started_it(way: str, tmp_path: Path) -> None:
    code = f"""
import asyncio
from dataflow.rewards.sandbox import local
local._ISOLATED = {{{way!r}: ""}}
asyncio.run(local.LocalSandbox(60, 512).run({"open('begun', 'w')" + chr(10) + FOREVER!r}, ""))
"""
    with subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)}) as parent:
        assert until(lambda: list(tmp_path.glob("sandbox-*/begun")), 60)
        parent.send_signal(signal.SIGKILL)
        parent.wait(20)
    assert until(lambda: not programs(tmp_path), 20)
    for place in tmp_path.glob("sandbox-*"):  # which nobody is left to remove
        shutil.rmtree(place)


def test_a_failure_of_the_sandbox_is_no_outcome(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    box = LocalSandbox(5, 512)
    for broken in (["sh", "-c", "echo no namespace >&2; exit 1"], ["/no/such/program"]):
        monkeypatch.setattr(local, "words", lambda *_words, line=broken: line)
        with pytest.raises(SandboxError, match=r"was not started: no namespace|no process could be started") as caught:
            asyncio.run(box.run("print(1)", ""))
        assert caught.value.retry is True


def test_without_any_way_the_reason_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    isolation.cache_clear()
    monkeypatch.setenv("PATH", "/no/such/folder")
    with pytest.raises(ConfigError, match=r"no program can be run .*rlimits: .*setpriv.*install util-linux"):
        isolation(LIMITS)
