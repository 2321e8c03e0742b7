"""A sandbox on this machine: a process per program, within limits. For tests and small runs."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from dataflow.rewards.sandbox.outcome import Outcome, SandboxError, Status

JAIL = Path(__file__).with_name("jail.py")
_DISK_MB, _FILES, _PROCESSES = 64, 256, 32
_STDERR = 2000  # characters that are kept
_START_S = 60.0
"""Seconds that the jail may take besides those of the program."""
_END_S = 10.0
_LIMITS: Mapping[str, Status] = {
    "timeout": "timeout",
    "memory_limit": "memory_limit",
    "process_limit": "process_limit",
}
_warned: set[str] = set()


class LocalSandbox:
    """Runs Python programs in processes of this machine.

    Args:
        timeout: seconds that a program may take.
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
                fix="lower manager_kwargs.max_concurrent, or raise the system's limits of files and processes",
            ) from error

    async def close(self) -> None:
        """Does nothing: programs end with their calls."""

    async def _run(self, place: Path, source: str, stdin: str) -> Outcome:
        work = place / "work"
        work.mkdir()
        (place / "code").write_bytes(source.encode(errors="surrogatepass"))
        (place / "stdin").write_bytes(stdin.encode(errors="surrogatepass"))
        told, tells = os.pipe()
        try:
            with (place / "stdin").open("rb") as given:
                # In a session of its own: signals of a terminal do not reach it.
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-I", "-S", "-B", str(JAIL), json.dumps(self._options(place, work, tells))),
                    stdin=given,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                    env={},
                    start_new_session=True,
                    pass_fds=(tells,),
                )
            os.close(tells)
            tells = -1
            try:
                async with asyncio.timeout(self._timeout + _START_S):
                    (output, more), (errors, _) = await asyncio.gather(
                        self._read(process, process.stdout, self._most, ends=True),
                        self._read(process, process.stderr, 4 * _STDERR, ends=False),
                    )
                    await process.wait()
            except TimeoutError:
                raise SandboxError("the process around a program did not end in time") from None
            finally:
                await _end(process)
            said = os.read(told, 1 << 16).decode(errors="replace")
        finally:
            os.close(told)
            if tells >= 0:
                os.close(tells)
        messages = errors.decode(errors="replace")[-_STDERR:]
        status = "output_limit" if more else _status(said, messages)
        return Outcome(status, output.decode(errors="replace"), messages)

    def _options(self, place: Path, work: Path, tells: int) -> dict[str, Any]:
        names = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": str(work), "TMPDIR": str(work)}
        # Libraries for arrays would start a thread for each core, each with memory of its own.
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        return {
            "parent": os.getpid(),
            "report": tells,
            "code": str(place / "code"),
            "work": str(work),
            "command": [sys.executable, "-s", "-B", "main.py"],
            "environment": names | threads,
            "timeout": self._timeout,
            "memory_mb": self._memory_mb,
            "disk_mb": _DISK_MB,
            "files": _FILES,
            "processes": _PROCESSES,
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


def _status(said: str, messages: str) -> Status:
    """Reads the jail's report."""
    try:
        first, last = map(json.loads, said.splitlines()[:2])
    except ValueError as error:
        raise SandboxError(f"the process around a program ended without a report: {messages[-300:]}") from error
    if first.get("missing"):
        _warn(first["missing"])
    end = last.get("end")
    if end == "exit":
        code = last["code"]
        if code in (-signal.SIGXCPU, -signal.SIGKILL):
            return "timeout" if code == -signal.SIGXCPU else "memory_limit"
        return "finished" if code == 0 else "runtime_error"
    if end not in _LIMITS:
        raise SandboxError(f"a program could not be run: {last.get('why', end)}")
    return _LIMITS[end]


def _warn(why: str) -> None:
    """Says once what this system does not protect from."""
    if why in _warned:
        return
    _warned.add(why)
    from loguru import logger  # it takes a while to import, and most processes never warn

    logger.warning(
        f"sandbox: this system gives programs no namespaces of their own ({why}): they can reach the network, read "
        "this user's processes, and write wherever this user can; run them at a service (manager_kwargs.url)."
    )
