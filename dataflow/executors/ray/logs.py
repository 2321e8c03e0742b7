"""Brings warnings of actors to the run's own log.

Ray writes the output of its workers to files, which are rarely read during a run. So each report of a task carries the
lines that its process logged since the last report.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

from loguru import logger

from dataflow.system.secrets import redact

_MAX_LINES = 100  # kept until the next report

Lines = tuple[tuple[str, str], ...]
"""Level and text of each line."""


class KeptLines:
    """A loguru sink that keeps lines until they are reported."""

    def __init__(self) -> None:
        self._lines: deque[tuple[str, str]] = deque()
        self._left_out = 0
        self._lock = threading.Lock()

    def __call__(self, message: Any) -> None:
        text = redact(str(message.record["message"]))
        with self._lock:
            if len(self._lines) < _MAX_LINES:
                self._lines.append((message.record["level"].name, text))
            else:
                self._left_out += 1

    def take(self) -> Lines:
        """Returns the lines and clears them."""
        with self._lock:
            lines, left_out = tuple(self._lines), self._left_out
            self._lines.clear()
            self._left_out = 0
        return (*lines, ("WARNING", f"{left_out} further warnings are in Ray's logs.")) if left_out else lines


KEPT = KeptLines()
"""The lines of this process."""


def keep_lines() -> None:
    """Keeps warnings and errors of this process for the next report; Ray's log files have them, too."""
    logger.add(KEPT, level="WARNING")


def log_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Logs lines of another process in this one."""
    for level, text in lines:
        logger.log(level, "{}", text)
