"""What every actor of a service does in its own process."""

from __future__ import annotations

import gc
import sys

DEATH_REASON = "DATAFLOW_DEATH_REASON"
"""The environment variable that names the file for the reason why a service's process has frozen and was ended."""

NODE_ADDRESS = "DATAFLOW_NODE_ADDRESS"
"""The environment variable with the address of the node that a service's process is on."""

WORKING_DIRECTORY = "DATAFLOW_WORKING_DIRECTORY"
"""The environment variable with the run's working directory, to which the user's relative paths refer."""


def version() -> str:
    """Returns the version of this package; its name cannot be imported from a module below it."""
    return str(sys.modules["dataflow"].__version__)


def settle_memory() -> None:
    """Excludes what was imported and built from garbage collection, and makes collections rarer.

    An agent with 4,096 calls in flight holds 140,000 live objects. Walking them after each 700 new ones, as by default,
    takes a fifth of its CPU time; reference counting frees them when their call ends.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
