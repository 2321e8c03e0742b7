"""Joins a Ray cluster, prints what it has as JSON, and leaves it: `python -m dataflow.executors.ray ADDRESS`.

A process of its own, since Ray may retry for minutes and can then only be killed. Only a dry run starts it.
"""

from __future__ import annotations

import json
import sys

from dataflow.errors import ConfigError
from dataflow.executors.ray.connection import joined


def main(address: str) -> None:
    try:
        with joined(address):
            import ray

            found = {"nodes": ray.nodes(), "free": ray.available_resources()}
    except ConfigError as error:
        found = {"error": str(error)}
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main(sys.argv[1])
