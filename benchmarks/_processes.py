"""Follows a process and all below it, for the benchmarks of what they take."""

from __future__ import annotations

import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import psutil


class Follower(ABC):
    """Looks at a process and at those below it again and again, in a thread, until it is closed.

    Args:
        root: id of the process.
        every_s: seconds from one look to the next.
    """

    def __init__(self, root: int, every_s: float) -> None:
        self._root = psutil.Process(root)
        self._every_s = every_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self.look([self._root, *self._root.children(recursive=True)])
            except psutil.Error:  # it has ended
                return

    @abstractmethod
    def look(self, processes: Sequence[psutil.Process]) -> None:
        """Takes what the processes show; one that has ended raises psutil.Error."""

    def close(self) -> None:
        """Stops following."""
        self._over.set()
        self._thread.join()


def name_of(words: list[str]) -> str:
    """Returns a short name of a process, from its command line."""
    text = " ".join(words)
    if module := re.search(r"-m (dataflow[\w.]*)", text):
        return "the run and its supervisor" if module[1] == "dataflow" else module[1]
    if ray := re.search(r"ray::(\w+)", text):
        return f"ray::{ray[1]}"
    return Path(words[0]).name if words else "ended"
