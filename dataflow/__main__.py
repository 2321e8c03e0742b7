"""The command's entry point: from its first line a signal ends the command with one line and the right exit code."""

from __future__ import annotations

import os
import signal
import sys

from dataflow.system.stopping import SIGNALS, stopping


def main() -> int:
    """Runs the command of this process's arguments; see :func:`dataflow.cli.main`."""
    with stopping:
        try:
            with stopping.deferred():
                stopping.calls(_end)
                from dataflow.cli import main as run_command
            code = run_command()
        except BaseException:
            from dataflow.commands.ending import interrupted

            code = interrupted()
    # The result is printed and the exit code is known: the interpreter's exit is not interrupted.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return code


def _end() -> None:
    """Ends the process: during the imports Python may lose a KeyboardInterrupt, in a callback of its own."""
    os.write(2, b"\ninterrupted\n")
    os._exit(stopping.exit_code)


if __name__ == "__main__":
    sys.exit(main())
