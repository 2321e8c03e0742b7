"""Whether a server process on this machine answers, and until when."""

from __future__ import annotations

import contextlib
import http.client
import os
import select
import time
from collections.abc import Callable

from dataflow.system.loopback import ADDRESS

HANG_S = 60.0
"""Seconds without an answer to GET /health after which a server is ended, to be started again."""
_CHECK_S = 5.0
"""Seconds between two checks of a server that runs."""


def answers(port: int, timeout_s: float = 5.0, well: bool = True, address: str = ADDRESS) -> bool:
    """Whether a server on this machine answers GET /health.

    Args:
        port: of the server.
        timeout_s: seconds that it may take.
        well: whether it must say that it is well; otherwise any answer will do.
        address: where it listens.
    """
    connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200 or not well
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def hangs(pid: int, answering: Callable[[], bool], limit_s: float = HANG_S) -> bool:
    """Waits until a process has ended or has not answered for so long that it must hang; returns whether it hangs.

    Where the system cannot wait for both, it returns at once that it does not.

    Args:
        pid: of a child of this process.
        answering: asks it; may take as long as ``limit_s``.
        limit_s: seconds without an answer.
    """
    if not hasattr(os, "pidfd_open"):
        return False
    with contextlib.ExitStack() as stack:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        stack.callback(os.close, ended)
        end = select.poll()
        end.register(ended, select.POLLIN)
        last = time.monotonic()
        while not end.poll(1000 * min(_CHECK_S, limit_s)):
            if answering():
                last = time.monotonic()
            elif time.monotonic() - last >= limit_s:
                return True
    return False
