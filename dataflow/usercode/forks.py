"""Processes that user code forks: they may not continue as the run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_one_process() -> Iterator[None]:
    """Ends a process that the block has forked and that leaves the block, by a return or an exception.

    It would continue as a second run, with the same files. It happens if ``os.fork()`` is called without ``os._exit()``
    in the child, or if ``os.exec*()`` raises there.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        end_if_forked(pid)


def end_if_forked(pid: int) -> None:
    """Ends this process unless it has the given id."""
    if os.getpid() != pid:
        os._exit(1)
