"""Plans one window of a run in a process of its own, at a low priority: `python -m dataflow.planning.auto`.

Standard input has the pickled arguments of :func:`forecast`; standard output gets its answer as JSON. Only the run
itself starts it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import sys

from dataflow.planning.auto.forecast import forecast

NICE = 10
"""Added to its niceness. With more, it would starve where training keeps all cores busy."""


def main() -> None:
    os.nice(NICE)
    print(json.dumps(dataclasses.asdict(forecast(*pickle.load(sys.stdin.buffer)))))


if __name__ == "__main__":
    main()
