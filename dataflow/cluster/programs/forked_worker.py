"""Starts a worker of Ray as a copy of the process that :mod:`dataflow.cluster.fork_server` keeps, or as itself.

Ray runs this file in place of its own ``default_worker.py``. It imports nothing of this package, to be quick.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import sys

SERVER = "DATAFLOW_FORK_SERVER"
"""The environment variable with the path of the server's socket."""
OUT_OF_MEMORY = "/proc/self/oom_score_adj"
"""Which process the kernel ends first when there is no memory: Ray's workers before others."""


def main() -> None:
    """Asks for a copy; becomes the worker itself if there is none."""
    ray = importlib.util.find_spec("ray")
    assert ray is not None
    assert ray.origin is not None
    command = [os.path.join(os.path.dirname(ray.origin), "_private", "workers", "default_worker.py"), *sys.argv[1:]]
    if not _copied(command):
        os.environ.pop(SERVER, None)
        os.execv(sys.executable, [sys.executable, *command])


def _copied(command: list[str]) -> bool:
    request: dict[str, object] = {
        "command": command,
        "environment": {name: value for name, value in os.environ.items() if name != SERVER},
        "directory": os.getcwd(),
        "python": sys.executable,
        "ignores": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "masked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    try:
        with open(OUT_OF_MEMORY) as file:
            request["out_of_memory"] = file.read()
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(os.environ[SERVER])
            socket.send_fds(server, [b"0"], [0, 1, 2])
            server.sendall(json.dumps(request).encode())
            server.shutdown(socket.SHUT_WR)
            return server.recv(1) == b"1"
    except (OSError, KeyError):
        return False


if __name__ == "__main__":
    main()
