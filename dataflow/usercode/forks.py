"""Processes that user code forks: they may not continue as the run.

A child of ``os.fork()`` that returns to the run, or raises into it, would continue as a second run with the same files,
sockets and event loop. It happens if ``os._exit()`` is not called in the child, or if ``os.exec*()`` raises there.
Children that end by themselves, as those of ``multiprocessing``, are not affected.
"""

from __future__ import annotations

import os
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

_WORDS = b"dataflow: a process that user code forked has returned to the run and was ended; call os._exit() in it.\n"


class _Generation:
    """The number of forks between the first process and this one: cheaper to read than the process id."""

    number = 0

    @classmethod
    def next(cls) -> None:
        cls.number += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Generation.next)


def _end_if_forked(since: int) -> None:
    """Ends this process if it was forked when the number of forks was ``since``."""
    if _Generation.number != since:
        with suppress(OSError):
            os.write(2, _WORDS)
        os._exit(1)


@contextmanager
def in_one_process() -> Iterator[None]:
    """Ends a process that the block has forked and that leaves the block, by a return or an exception."""
    since = _Generation.number
    try:
        yield
    finally:
        _end_if_forked(since)


class OneProcess(Coroutine[Any, Any, Any]):
    """A coroutine of user code that runs as a task; ends a process that one of its steps has forked."""

    __slots__ = ("_inner", "_since")

    def __init__(self, inner: Coroutine[Any, Any, Any]) -> None:
        self._inner = inner
        self._since = _Generation.number

    def send(self, value: Any) -> Any:
        try:
            return self._inner.send(value)
        finally:
            _end_if_forked(self._since)

    def throw(self, *raised: Any) -> Any:
        try:
            return self._inner.throw(*raised)
        finally:
            _end_if_forked(self._since)

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()
