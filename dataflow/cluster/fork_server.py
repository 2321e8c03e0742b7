"""A process that has imported what Ray's workers need, and is forked for each of them.

The workers of a run import the same libraries: torch, transformers and verl take 5 s of CPU and 400 MB in each of four
processes. Here one process imports them, beside the start of Ray, and each worker begins as a copy of it, in
milliseconds and with the same memory. Ray starts a worker by :mod:`dataflow.cluster.programs.forked_worker`, which
asks for a copy, and becomes a worker as usual where there is none.

On the CPU alone: a copy cannot use a GPU that the copied process has looked at. Only a process with one thread is
copied, as the locks that other threads hold would stay locked; only one that has not imported Ray, whose library draws
the ids of objects from a generator that copies would share; and only for a worker with the environment in which the
modules were imported, as they may have read it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.cluster.programs.forked_worker import OUT_OF_MEMORY, SERVER
from dataflow.system.children import command
from dataflow.system.supervisor import report

_OWN = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TOKENIZERS_PARALLELISM", "PYTHONSAFEPATH", "SPT_NOENV", SERVER)
"""Variables in which the process may differ from a worker; further ones begin with RAY_."""
_PATH_BYTES = 60
"""Longest name of the directory for temporary files: the path of a socket has 107 bytes at most."""


class ForkServer:
    """Starts the process; it imports the modules while this one goes on.

    Args:
        modules: to import; none of them may import Ray. Those that are not installed are left out.
        threads: OMP threads of each worker.
    """

    def __init__(self, modules: Sequence[str], threads: int = 1) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="dataflow-fork-")
        report(temporary=self._home.name)
        path = str(Path(self._home.name) / "socket")
        self.environment = {SERVER: path}
        """Variables that Ray's processes inherit, so that its workers find this one."""
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(128)
            self._process = subprocess.Popen(
                command(__name__, str(listener.fileno()), *modules),
                stdin=subprocess.PIPE,  # closed when this process ends, whatever ends it
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # a worker that is no copy says what is wrong with a module
                pass_fds=[listener.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal ends the run, which ends this process
                # OpenBLAS begins its threads when it is loaded.
                env={"OPENBLAS_NUM_THREADS": "1", **os.environ, "OMP_NUM_THREADS": str(threads)},
            )

    def close(self) -> None:
        """Ends the process, but no worker; may be called twice."""
        with self._process:
            self._process.kill()
        self._home.cleanup()


def available() -> bool:
    """Whether this machine can have such a process: Linux, without a GPU."""
    short = len(os.fsencode(tempfile.gettempdir())) <= _PATH_BYTES
    return sys.platform == "linux" and short and not any(Path("/dev").glob("nvidia[0-9]*"))


def main(listener: int, modules: Sequence[str]) -> None:
    """Serves copies until stdin is closed; returns in each copy, as a worker of Ray that has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    original = _Original(modules)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the copies
    with socket.socket(fileno=listener) as server:
        request = original.serve(server)
    if request is not None:
        original.work(request)


class _Original:
    """The process that is copied.

    Args:
        modules: to import.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        before = dict(os.environ)
        self._environment = _compared(before)
        for module in modules:
            with contextlib.suppress(ImportError):  # the worker that needs it says what is missing
                importlib.import_module(module)
        self._set = {name: value for name, value in os.environ.items() if before.get(name) != value}
        """Variables that the modules have set."""
        gc.collect()
        gc.freeze()  # a collection would write to memory that copies share

    def serve(self, server: socket.socket) -> dict[str, Any] | None:
        """Returns the request in a copy that it made; None once stdin is closed."""
        while True:
            ready, _, _ = select.select([server, sys.stdin], [], [])
            if sys.stdin in ready:
                return None
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError, ValueError):
                _, streams, _, _ = socket.recv_fds(connection, 1, 3)
                try:
                    request: dict[str, Any] = json.load(connection.makefile("r"))
                    if not self._suits(request) or _gone(connection):
                        continue
                    if os.fork() == 0:
                        os.setpgid(0, 0)  # Ray kills the process group of a worker that has ended
                        for number, stream in enumerate(streams):
                            os.dup2(stream, number)
                        return request
                    connection.sendall(b"1")
                finally:
                    for stream in streams:
                        os.close(stream)

    def _suits(self, request: dict[str, Any]) -> bool:
        """Returns whether a copy would be what a new process is."""
        alone = len(os.listdir("/proc/self/task")) == 1 and "ray" not in sys.modules
        same = request["python"] == sys.executable and _compared(request["environment"]) == self._environment
        return alone and same

    def work(self, request: dict[str, Any]) -> None:
        """Runs Ray's worker in this process as if it had been started by the request's command."""
        os.environ.clear()
        os.environ.update(request["environment"] | self._set)
        os.chdir(request["directory"])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN if request["ignores"] else signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, request["masked"])
        with contextlib.suppress(OSError):  # a container may forbid it
            Path(OUT_OF_MEMORY).write_text(request["out_of_memory"])
        if "numpy.random" in sys.modules:  # Python's own generator is by itself; torch's always begins with one seed
            sys.modules["numpy.random"].seed()
        sys.argv = request["command"]
        runpy.run_path(sys.argv[0], run_name="__main__")


def _compared(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that modules may have read when they were imported."""
    return {name: value for name, value in environment.items() if not name.startswith("RAY_") and name not in _OWN}


def _gone(connection: socket.socket) -> bool:
    """Returns whether the process that asked has ended: Ray ends one that waits for too long, and starts another."""
    poll = select.poll()
    poll.register(connection, 0)  # which reports the other side's end alone
    return bool(poll.poll(0))


if __name__ == "__main__":
    from dataflow.cluster import fork_server

    fork_server.main(int(sys.argv[1]), sys.argv[2:])
