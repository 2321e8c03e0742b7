"""Protects the signal handlers and the output of this process from Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from loguru import logger

from dataflow.system.stopping import stopping

_REPORTED = ("Raylet is terminated", "A worker died or was killed", "Task ServerHost.")
"""Prefixes of messages about deaths that dataflow reports itself, with their consequences."""


@contextlib.contextmanager
def console_kept() -> Iterator[None]:
    """Keeps the signal handlers while Ray starts, and logs what Ray would print from then on.

    Ray installs its own SIGTERM handler during its start, and prints messages of the cluster on stdout, in colours even
    if that is not a terminal.
    """
    import ray._private.utils as utils
    import ray._private.worker as worker

    theirs = utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda handler: None
    worker.print_to_stdstream = _message
    try:
        yield
    finally:
        utils.set_sigterm_handler = theirs
        stopping.reinstall()


def _message(data: Mapping[str, Any], ignore_prefix: bool = False) -> None:
    """Logs the first line of a message of the cluster; further lines only quote a log file."""
    text = "\n".join(map(str, data.get("lines", ()))).strip()
    if text:
        level = "DEBUG" if text.startswith(_REPORTED) else "WARNING"
        logger.log(level, "Ray's {}: {}", data.get("pid", "cluster"), text.splitlines()[0])
