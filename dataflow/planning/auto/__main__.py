"""Plans one window of a run in a process of its own, at the lowest priority: `python -m dataflow.planning.auto`.

Standard input has the pickled arguments of :func:`forecast`; standard output gets its answer as JSON. Only the run
itself starts it.
"""

from __future__ import annotations

import json
import os
import pickle
import sys

from dataflow.planning.auto.forecast import forecast


def main() -> None:
    os.nice(19)
    print(json.dumps(forecast(*pickle.load(sys.stdin.buffer))))


if __name__ == "__main__":
    main()
