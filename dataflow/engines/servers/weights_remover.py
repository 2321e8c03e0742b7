"""A process beside an engine that removes its weights' files if the engine is killed, wherever that runs.

    python -P -m dataflow.engines.servers.weights_remover DIRECTORY OWNER

waits for the end of its standard input, which the engine holds open, and then removes what it can only find again by
the name of its run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from loguru import logger

from dataflow.engines.servers.weights_files import remove_weights
from dataflow.system.children import command
from dataflow.system.stopping import SIGNALS

_END_S = 5.0
"""Seconds for the end of the process; it does not end while a process that the engine has forked holds its input."""


class WeightsRemover:
    """Starts the process.

    Args:
        directory: with the weights.
        owner: id of the engine that writes there; what another one has taken over is not removed.
    """

    def __init__(self, directory: Path, owner: str) -> None:
        self._directory, self._owner = directory, owner
        self._process: subprocess.Popen[bytes] | None = None
        started, why = b"", ""
        try:
            self._process = subprocess.Popen(
                command(__name__, str(directory), owner),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,  # open as long as it runs
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ray kills the process group of a worker that has ended
            )
            assert self._process.stdout is not None
            started = self._process.stdout.readline()  # until it has another parent
        except OSError as error:
            why = f" ({error})"
        if not started:
            logger.warning(
                f"rollout: the process that removes the weights in {directory} if this one is killed did not "
                f"start{why}; remove them yourself then."
            )

    def close(self) -> None:
        """Removes the files and ends the process; may be called twice."""
        remove_weights(self._directory, self._owner)  # here, too: the process may have been killed
        if self._process is not None and self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.communicate(timeout=_END_S)


def main() -> None:
    directory, owner = sys.argv[1:]
    for number in SIGNALS:  # they end the engine, too, which is waited for
        signal.signal(number, signal.SIG_IGN)
    if os.fork():  # Ray kills the children of a worker that it ends; those of another parent stay
        os._exit(0)
    print(flush=True)
    while os.read(0, 4096):
        pass
    remove_weights(Path(directory), owner)


if __name__ == "__main__":
    main()
