"""A sandbox on this machine: a process for each program, within limits, and isolated by what is installed."""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from loguru import logger

from dataflow.errors import ConfigError
from dataflow.rewards.sandbox.cases import STDERR, Outcome, SandboxError, Status
from dataflow.system.http import short

WALL = 3
"""How many times its CPU seconds a program may take on the wall clock: others may have the cores."""
_MOST = 1 << 20  # bytes of output
_FILE_MB, _FILES = 64, 256
_BEGUN = b"the program begins\n"
_BEGIN = ("sh", "-c", f'echo {_BEGUN.decode().strip()} >&2; exec "$@"', "sh")
"""Without this line on stderr a program was not started, and what failed is the sandbox."""
_LATE = (128 + signal.SIGXCPU, -signal.SIGXCPU)
_SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
"""What a program sees in bwrap, besides Python and its own folder."""
_ISOLATED: Mapping[str, str] = {
    "bwrap": "in bwrap: no network, no other processes, of the files only Python and the system's libraries; not "
    "isolated: the kernel, and the cores, memory and disk that all programs share",
    "unshare": "in namespaces of unshare: no network, no other processes; not isolated: files, which they can read and "
    "write as you can, the kernel, and the cores, memory and disk that all programs share; install bubblewrap, or use "
    "a service (manager_kwargs.url)",
    "rlimits": "within rlimits alone; not isolated: files, network and processes, which they can use as you can, and "
    "one that leaves its process group goes on after its time-out; install bubblewrap or util-linux's unshare where "
    "users may make namespaces, or use a service (manager_kwargs.url)",
}
"""The ways to run a program, the best first, and what they isolate."""
_FIX = "lower manager_kwargs.max_concurrent, or raise the system's limits of processes and memory"


class LocalSandbox:
    """Runs Python programs in processes of this machine.

    ``timeout`` limits the CPU seconds of a process, and ``memory_limit_mb`` its memory. The program may take
    :data:`WALL` times as many seconds in all.
    """

    def __init__(self, timeout: float, memory_limit_mb: int) -> None:
        self._longest, seconds = WALL * timeout, math.ceil(timeout)
        # At the first of the two limits the system sends SIGXCPU, at the second SIGKILL.
        sizes = (f"--as={memory_limit_mb << 20}", f"--fsize={_FILE_MB << 20}", f"--nofile={_FILES}", "--core=0")
        self._limits = ("prlimit", f"--cpu={seconds}:{seconds + 1}", *sizes, "--")
        self.isolation = isolation(self._limits)

    async def run(self, source: str, stdin: str) -> Outcome:
        """Runs a program; cancelling this coroutine ends it. SandboxError if it could not be started."""
        try:
            place = tempfile.mkdtemp(prefix="sandbox-")
            try:
                return await self._run(place, source, stdin)
            finally:  # in a thread: a program may leave many files
                await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
        except OSError as error:
            raise SandboxError(f"no process could be started for a program ({error})", fix=_FIX) from error

    async def _run(self, place: str, source: str, stdin: str) -> Outcome:
        Path(place, "main.py").write_text(source, encoding="utf-8", errors="surrogatepass")
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            given.write(stdin.encode(errors="surrogatepass"))
            given.seek(0)
            process = await asyncio.create_subprocess_exec(
                *words(self.isolation, self._limits, place, "main.py"),
                stdin=given,
                stdout=output,
                stderr=errors,
                cwd=place,
                env=_environment(place),
                start_new_session=True,
            )
            late = False
            try:
                async with asyncio.timeout(self._longest):
                    await process.wait()
            except TimeoutError:
                late = True
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            for file in (output, errors):
                file.seek(0)
            shown = output.read(_MOST + 1)
            before, begun, messages = errors.read().partition(_BEGUN)
        if not begun:
            raise SandboxError(f"a program was not started: {short(before.decode(errors='replace'))}", fix=_FIX)
        said = messages[-STDERR:].decode(errors="replace")
        status: Status = "finished" if process.returncode == 0 else "runtime_error"
        if len(shown) > _MOST:
            status = "output_limit"
        elif late or process.returncode in _LATE:
            status = "timeout"
        elif status == "runtime_error" and said.rstrip().rpartition("\n")[2].startswith("MemoryError"):
            status = "memory_limit"
        return Outcome(status, shown[:_MOST].decode(errors="replace"), said)

    async def close(self) -> None:
        """Does nothing: programs end with their calls."""


@cache
def isolation(limits: tuple[str, ...]) -> str:
    """Returns the best way to run programs on this machine, and logs what it does not isolate."""
    problems = []
    for name, isolated in _ISOLATED.items():
        with tempfile.TemporaryDirectory(prefix="sandbox-") as place:
            line = words(name, limits, place, "-c", "")
            try:
                subprocess.run(line, check=True, capture_output=True, cwd=place, env=_environment(place), timeout=60)
            except subprocess.CalledProcessError as error:
                problems.append(f"{name}: {short(error.stderr.replace(_BEGUN, b'').decode(errors='replace'))}")
            except (OSError, subprocess.TimeoutExpired) as error:
                problems.append(f"{name}: {error}")
            else:
                logger.log("WARNING" if name == "rlimits" else "INFO", f"sandbox: programs run {isolated}.")
                return name
    raise ConfigError(
        f"reward manager 'sandbox': no program can be run on this machine ({'; '.join(problems)}); install util-linux, "
        "raise memory_limit_mb, or give the url of a service."
    )


def words(name: str, limits: tuple[str, ...], place: str, *arguments: str) -> list[str]:
    """Returns the command line that runs Python in a folder in one of the ways of :data:`_ISOLATED`."""
    program = (*limits, *_BEGIN, sys.executable, "-s", "-B", *arguments)
    if name == "bwrap":
        python = {each for folder in (sys.prefix, sys.base_prefix) for each in (folder, os.path.realpath(folder))}
        seen = [word for path in (*_SYSTEM, *sorted(python)) for word in ("--ro-bind-try", path, path)]
        mounts = (*seen, "--proc", "/proc", "--dev", "/dev", "--bind", place, place, "--remount-ro", "/")
        return ["bwrap", "--die-with-parent", "--unshare-all", *mounts, "--chdir", place, *program]
    # The program ends with the process that started it, and gets no rights by a file that would give it some.
    tied = ["setpriv", "--no-new-privs", "--pdeathsig", "KILL"]
    if name == "unshare":
        namespaces = ("--user", "--map-current-user", "--net", "--ipc", "--pid", "--mount-proc", "--kill-child")
        # The first process of a namespace gets no signals but SIGKILL, so that it is not the program.
        return [*tied, "unshare", *namespaces, "sh", "-c", '"$@"; exit $?', "sh", *program]
    return [*tied, *program]


def _environment(place: str) -> dict[str, str]:
    names = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C.UTF-8", "HOME": place, "TMPDIR": place}
    # Libraries for arrays would start a thread for each core, each with memory of its own.
    return names | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
