"""Ends a service's process whose event loop user code keeps from running, with the stacks of all its threads.

The watchdog of faulthandler is a thread of C, which ends even a process whose lock (the GIL) user code keeps.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
from contextlib import suppress

DEATH_REASON = "DATAFLOW_DEATH_REASON"
"""The environment variable that names the file for the reason why a service's process has frozen and was ended."""

_watching: list[FrozenExit] = []  # one watchdog serves all: the process ends whichever armed it last


def frozen_exit(after_s: float | None, what: str, key: str, fix: str) -> FrozenExit | None:
    """Returns what ends this process if it freezes; None in the run's own process, or without a limit.

    ``after_s`` is the limit in seconds, and ``key`` its key. ``what`` is a function that may freeze it, ``fix`` what to
    do about it.
    """
    path = os.environ.get(DEATH_REASON)
    if not after_s or path is None:
        return None
    why = f"{what} kept Python's lock, or blocked the event loop, for {after_s:g} s, in which nothing else ran"
    return FrozenExit(after_s, f"{why} ({key}); the log has the stacks; {fix}.", path)


class FrozenExit:
    """Ends this process, with exit code 1, when its event loop has not run for ``after_s`` seconds.

    The executor reads the file at ``path``: ``why``, then the stacks if the process has frozen.
    """

    def __init__(self, after_s: float, why: str, path: str) -> None:
        self.after_s, self.why, self._path = after_s, why, path

    def start(self) -> None:
        """Watches the running event loop until :meth:`close`."""
        self._file = open(self._path, "w")  # noqa: SIM115
        self._file.write(f"{self.why}\n")
        self._file.flush()
        _watching.append(self)
        self._watch(asyncio.get_running_loop())

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        self._arm()
        self._timer = loop.call_later(self.after_s / 3, self._watch, loop)

    def _arm(self) -> None:
        faulthandler.dump_traceback_later(self.after_s, exit=True, file=self._file)

    def close(self) -> None:
        """Ends the watch."""
        self._timer.cancel()
        _watching.remove(self)
        if _watching:
            _watching[-1]._arm()
        else:
            faulthandler.cancel_dump_traceback_later()
            with suppress(FileNotFoundError):
                os.unlink(self._path)
        self._file.close()
