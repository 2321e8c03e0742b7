"""Replaces Ray's dashboard agent, which a raylet requires: reports that there are no ports, and sleeps until Ray ends.

Ray's own, which does no more without the dashboard's dependencies, takes 80 MB and a second of CPU. This file is run by
itself and imports nothing of this package or of Ray.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
"""What the raylet waits for, each in a file of the session's directory; -1 if there is none."""
_PDEATHSIG = 1  # of prctl(2)


def main(session: str, node: str) -> None:
    """Runs until the raylet ends this process, or has ended.

    Args:
        session: the directory of Ray's session.
        node: id of the node.
    """
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    with open(f"/proc/{os.getppid()}/cmdline", "rb") as file:
        if os.fsencode(session) not in file.read():
            # The raylet ended before, and this process has got another parent.
            print(f"the parent of this process is no raylet of {session}", file=sys.stderr)
            return
    for name in PORTS:
        path = os.path.join(session, f"{name}_{node}")
        with open(f"{path}.tmp", "w") as file:
            file.write("-1")
        os.replace(f"{path}.tmp", path)
    while True:
        signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], os.environ["RAY_NODE_ID"])
