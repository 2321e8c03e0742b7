"""A child process that serves HTTP: its port, its start, its end and its log."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path

from dataflow.errors import RunError
from dataflow.system.address import family_of, host_port
from dataflow.system.loopback import ADDRESS
from dataflow.system.secrets import redact

CLOSE_S = 5.0
"""Seconds that a server may take to end after SIGTERM."""
_CHECKS_S = (0.05, 0.5)
"""Seconds between two checks of a server that starts, at first and at most: nothing says that it listens."""
_TRY_S = 5.0
_TAIL = 1 << 18
"""Bytes at the end of a log in which a reason is looked for."""
_ERROR = re.compile(r"\b(?:\w+\.)*(?:\w*(?:Error|Exception|Exit)|error): (?=\S)")
_SECOND = re.compile(r"initialization failed|See root cause|Engine loop is not running|died unexpectedly")
"""Errors that follow from another one."""


class Port:
    """A free port that no other process gets while this object is open.

    Its socket is bound and does not listen, so that a server that sets SO_REUSEADDR, as all do, may listen there, and
    another one after it. This process or another one may hold ``number`` already; 0 takes a free port.
    """

    def __init__(self, address: str = ADDRESS, number: int = 0) -> None:
        self._socket = socket.socket(family_of(address), socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((address, number))
        self.address, self.number = address, int(self._socket.getsockname()[1])
        self.url = f"http://{host_port(address, self.number)}"

    def close(self) -> None:
        """Gives the port back."""
        self._socket.close()


class Child:
    """A child process that serves HTTP. It gets SIGTERM when the process that started it ends.

    A context manager, which waits until it answers.

    Args:
        words: command line, to which ``--host`` and ``--port`` are added.
        port: where it listens; closed with it.
        log: file to which its output is appended; None for that of this process.
        environment: all its variables; None for those of this process.
        start_s: seconds that it may take to answer.
        ready: path that it answers with 200 when it is ready.
    """

    def __init__(
        self,
        words: Sequence[str],
        port: Port,
        log: Path | None,
        environment: Mapping[str, str] | None,
        start_s: float,
        what: str,
        ready: str = "/health",
    ) -> None:
        self.url, self._port, self._log, self._start_s, self._what = port.url, port, log, start_s, what
        self._ready = ready
        self._words = [*words, "--host", port.address, "--port", str(port.number)]
        self._environment = None if environment is None else dict(environment)
        self._offset = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts the process; call it in a thread that lives as long: the kernel ends the process with that thread."""
        tied = ["setpriv", "--pdeathsig", "TERM", "--"] if shutil.which("setpriv") else []
        with ExitStack() as stack:
            output = None
            if self._log is not None:
                self._log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(self._log.open("ab"))
                self._offset = output.tell()
            # A session of its own: Ctrl-C reaches only the run, which ends the server after its last request.
            self._process = subprocess.Popen(
                [*tied, *self._words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=None if output is None else subprocess.STDOUT,
                start_new_session=True,
                env=self._environment,
            )

    def wait_ready(self) -> None:
        """Waits until it answers; raises a RunError if it does not in time, or has ended."""
        assert self._process is not None
        end, (pause_s, most_s) = time.monotonic() + self._start_s, _CHECKS_S
        see = "its own error is above" if self._log is None else f"see {self._log}"
        while not self._answers():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(pause_s)
                raise RunError(f"{self._what} did not start ({self.reason()}); {see}.")
            if time.monotonic() > end:
                why = f"no answer to GET {self._ready} in {self._start_s:g} s"
                raise RunError(f"{self._what} did not start ({why}); {see}.")
            pause_s = min(2 * pause_s, most_s)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready}", timeout=_TRY_S):
                return True
        except (OSError, HTTPException):
            return False

    async def ended(self) -> str:
        """Waits until it has ended; returns why."""
        assert self._process is not None
        if self._process.poll() is not None:
            return self.reason()
        loop = asyncio.get_running_loop()
        descriptor = os.pidfd_open(self._process.pid)  # no thread waits: a run may have many servers
        ended = asyncio.Event()
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        self._process.wait()
        return self.reason()

    async def restart(self) -> None:
        """Starts it again, after its end; ends first what it has left behind."""
        await asyncio.to_thread(self.stop)
        self.start()

    def reason(self) -> str:
        """Returns why it ended, from its exit code and its log."""
        code = (self._process.poll() if self._process is not None else 0) or 0
        if code == -signal.SIGKILL:
            return "killed, or out of memory"
        said = ""
        if self._log is not None:
            with suppress(OSError):  # the user has moved or removed it
                said = reason_in(self._log, self._offset)
        return said or f"exit code {code}"

    @property
    def pid(self) -> int:
        """Its id, and that of its process group."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> Child:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends it and gives its port back; may be called twice."""
        self.stop()
        self._port.close()

    def stop(self) -> None:
        """Ends it with all its processes and waits for them; may be called twice."""
        if self._process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(CLOSE_S)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue


def reason_in(log: Path, offset: int = 0) -> str:
    """Returns the last line of a log, from these bytes on, that names an error, or else its last line; "" without."""
    with log.open("rb") as file:
        file.seek(max(offset, file.seek(0, os.SEEK_END) - _TAIL))
        lines = [line for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    first = [line for line in errors if not _SECOND.search(line)]
    return redact((first or errors or lines or [""])[-1]).strip()[:300].rstrip(".")
