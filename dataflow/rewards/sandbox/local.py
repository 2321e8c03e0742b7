"""A sandbox on this machine: a process per program, within limits. For tests and small runs."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dataflow.rewards.sandbox.calls import filter_of
from dataflow.rewards.sandbox.outcome import Outcome, SandboxError, Status

JAIL = "import sys; sys.path.insert(0, {folder!r}); from jail.main import main; main()"
"""Starts the process around a program; what it imports is in this folder, and no more."""
_DISK_MB, _FILES, _PROCESSES, _THREADS = 64, 256, 32, 64
_HIDDEN = ("/dev", "/run", "/var/run", "/tmp", "/var/tmp")
"""Folders that a program sees empty: services have sockets and pipes in them."""
_STDERR = 2000  # characters that are kept
LATEST = 10
"""How many times its time a program may take if others have the cores."""
_START_S = 60.0
"""Seconds that the jail may take besides those of the program."""
_END_S = 10.0
_LIMITS: Mapping[str, Status] = {
    "timeout": "timeout",
    "memory_limit": "memory_limit",
    "process_limit": "process_limit",
}
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
_FIX = "lower manager_kwargs.max_concurrent, or raise the system's limits of files, processes and memory"
_warned: set[str] = set()


class LocalSandbox:
    """Runs Python programs in processes of this machine.

    Args:
        timeout: seconds that a program may take, without those in which it waits for a core that others have.
        memory_limit_mb: of a program, all its processes together.
        max_output_bytes: of a program.
        isolate: whether namespaces are used where the system has them.

    Attributes:
        retried: always 0; see :class:`~dataflow.rewards.sandbox.remote.RemoteSandbox`.
    """

    retried = 0

    def __init__(
        self, timeout: float, memory_limit_mb: int, max_output_bytes: int = 1 << 20, isolate: bool = True
    ) -> None:
        self._timeout, self._memory_mb, self._most, self._isolate = timeout, memory_limit_mb, max_output_bytes, isolate

    async def run(self, source: str, stdin: str) -> Outcome:
        """Runs a program; cancelling this coroutine ends it.

        Raises:
            SandboxError: the process could not be started, or ended in an unknown way.
        """
        try:
            place = tempfile.mkdtemp(prefix="sandbox-")
            try:
                return await self._run(Path(place), source, stdin)
            finally:
                # A program may leave many files, or folders that cannot be read.
                await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
        except OSError as error:
            raise SandboxError(
                f"no process could be started for a program ({error})",
                fix=_FIX,
            ) from error

    async def close(self) -> None:
        """Does nothing: programs end with their calls."""

    async def _run(self, place: Path, source: str, stdin: str) -> Outcome:
        work = place / "work"
        work.mkdir()
        reader, writer = os.pipe()
        try:
            with _held(source) as code, _held(stdin) as given:
                # In a session of its own: signals of a terminal do not reach it.
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-c", JAIL.format(folder=str(Path(__file__).parent))),
                    json.dumps(self._options(work, writer, code)),
                    stdin=given,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={},
                    start_new_session=True,
                    pass_fds=(writer, code),
                )
            os.close(writer)
            writer = -1
            try:
                async with asyncio.timeout(LATEST * self._timeout + _START_S):
                    (output, more), (errors, _) = await asyncio.gather(
                        self._read(process, process.stdout, self._most, ends=True),
                        self._read(process, process.stderr, 4 * _STDERR, ends=False),
                    )
                    await process.wait()
            except TimeoutError:
                raise SandboxError("the process around a program did not end in time", fix=_FIX) from None
            finally:
                await _end(process)
            reported = os.read(reader, 1 << 16).decode(errors="replace")
        finally:
            os.close(reader)
            if writer >= 0:
                os.close(writer)
        messages = errors.decode(errors="replace")[-_STDERR:]
        status = "output_limit" if more else _status(reported, messages, process.returncode)
        return Outcome(status, output.decode(errors="replace"), messages)

    def _options(self, work: Path, writer: int, code: int) -> dict[str, Any]:
        names = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": str(work), "TMPDIR": str(work)}
        # Libraries for arrays would start a thread for each core, each with memory of its own.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return {
            "parent": os.getpid(),
            "report": writer,
            "code": code,
            "work": str(work),
            "hidden": _HIDDEN,
            "keep": _kept(),
            "command": [sys.executable, "-s", "-B", "main.py"],
            "environment": names | threads,
            "timeout": self._timeout,
            "latest": LATEST * self._timeout,
            "calls": filter_of(os.uname().machine),
            # Signals to all processes of this user, to this one and to those of its terminal.
            "guarded": [-1, os.getpid(), -os.getpgrp()],
            "memory_mb": self._memory_mb,
            "disk_mb": _DISK_MB,
            "files": _FILES,
            "processes": _PROCESSES,
            "threads": _THREADS,
            "isolate": self._isolate,
        }

    async def _read(
        self, process: asyncio.subprocess.Process, stream: asyncio.StreamReader | None, most: int, *, ends: bool
    ) -> tuple[bytes, bool]:
        """Returns the beginning of a stream, or of one that ends nothing the end, and whether there was more."""
        assert stream is not None
        kept, more = b"", False
        while piece := await stream.read(1 << 16):
            kept += piece
            if len(kept) > most and not more:
                more = True
                if ends:
                    with suppress(ProcessLookupError):
                        process.terminate()
            if len(kept) > most:
                kept = kept[:most] if ends else kept[-most:]
        return kept, more


@contextmanager
def _held(text: str) -> Iterator[int]:
    """Yields a descriptor of a text in memory, which nobody can change: no file of this machine."""
    file = os.memfd_create("text", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with os.fdopen(file, "wb", closefd=False) as writes:
            writes.write(text.encode(errors="surrogatepass"))
        os.lseek(file, 0, os.SEEK_SET)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | _SEALS)
        yield file
    finally:
        os.close(file)


def _kept() -> list[str]:
    """Returns the folders of this Python that lie in hidden ones."""
    folders = {sys.prefix, sys.base_prefix}
    hidden = tuple(f"{os.path.realpath(folder)}/" for folder in _HIDDEN)
    return sorted(each for folder in folders for each in {folder, os.path.realpath(folder)} if each.startswith(hidden))


async def _end(process: asyncio.subprocess.Process) -> None:
    """Ends the jail, and with it the program, if it runs still."""
    if process.returncode is not None:
        return
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_END_S):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _status(reported: str, messages: str, code: int | None) -> Status:
    """Reads the jail's report.

    Args:
        reported: the report.
        messages: of the program.
        code: exit code of the jail.
    """
    try:
        first, *others = map(json.loads, reported.splitlines()[:2])
        if not others and first.get("missing") and code is not None and code < 0:
            return "runtime_error"  # without namespaces a program can end the process around it
        (last,) = others
    except ValueError as error:
        raise SandboxError(
            f"the process around a program ended without a report: {messages[-300:]}", fix=_FIX
        ) from error
    if missing := first.get("missing"):
        _warn(
            f"this system gives programs no namespaces of their own ({missing}): they can read this user's processes, "
            "and write wherever this user can"
        )
    if unfiltered := first.get("unfiltered"):
        _warn(
            f"this system does not forbid programs system calls ({unfiltered}): they can reach the sockets of this "
            "user's services, the network if they have no namespaces, and take memory that no limit counts"
        )
    end = last.get("end")
    if end == "exit":
        return "finished" if last["code"] == 0 else "runtime_error"
    if end not in _LIMITS:
        raise SandboxError(f"a program could not be run: {last.get('why', end)}", fix=_FIX)
    return _LIMITS[end]


def _warn(what: str) -> None:
    """Says once what this system does not protect from."""
    if what in _warned:
        return
    _warned.add(what)
    from loguru import logger  # it takes a while to import, and most processes never warn

    logger.warning(f"sandbox: {what}; run them at a service (manager_kwargs.url).")
