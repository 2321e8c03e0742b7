"""A child process of a plan, which simulates: `python -m dataflow.planning.simulation`.

Standard input has pickled jobs, one after the other; standard output gets the outcome of each.
"""

from __future__ import annotations

import os
import signal
import sys

from dataflow.planning.simulation.workers import serve


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the plan ends this one
    try:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        os._exit(1)  # that process is gone


if __name__ == "__main__":
    main()
