"""Warnings of an actor's process on their way to the run's own log.

Ray writes what its workers print to files, which nobody reads while a run goes. So each report of a task takes along
what its process has logged since the last one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from loguru import logger

from dataflow.system.redaction import redact

_MOST = 100  # lines that are kept until the next report

Lines = tuple[tuple[str, str], ...]
"""Level and text of each line."""


class KeptLines:
    """The lines that were logged and not yet reported; a sink of loguru's."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, str]] = deque()
        self._left_out = 0
        self._lock = threading.Lock()

    def __call__(self, message: Any) -> None:
        text = redact(str(message.record["message"]))
        with self._lock:
            if len(self._lines) < _MOST:
                self._lines.append((message.record["level"].name, text))
            else:
                self._left_out += 1

    def take(self) -> Lines:
        """Returns the lines, and forgets them."""
        with self._lock:
            lines, left_out = tuple(self._lines), self._left_out
            self._lines.clear()
            self._left_out = 0
        return (*lines, ("WARNING", f"{left_out} further warnings are in Ray's logs.")) if left_out else lines


KEPT = KeptLines()
"""Those of this process."""


def keep_lines() -> None:
    """Keeps warnings and errors of this process for the next report; they stay in Ray's logs, too."""
    logger.add(KEPT, level="WARNING")


def log_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Logs in this process what another one has logged."""
    for level, text in lines:
        logger.log(level, "{}", text)
