"""What Ray, once started, would do to this process's signals and to its output."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from loguru import logger

from dataflow.system.stopping import stopping

_REPORTED = ("Raylet is terminated", "A worker died or was killed")
"""Beginnings of messages about deaths that dataflow reports itself, with what follows from them."""


@contextlib.contextmanager
def console_kept() -> Iterator[None]:
    """Keeps the handlers of signals while Ray starts, and takes over what Ray would print from then on.

    Ray takes SIGTERM for itself halfway through its start, and prints the cluster's messages on stdout, in colours
    whatever that is.
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
    """Logs the first line of a message of the cluster; the others are the end of a log file, at most."""
    text = "\n".join(map(str, data.get("lines", ()))).strip()
    if text:
        level = "DEBUG" if text.startswith(_REPORTED) else "WARNING"
        logger.log(level, "Ray's {}: {}", data.get("pid", "cluster"), text.splitlines()[0])
