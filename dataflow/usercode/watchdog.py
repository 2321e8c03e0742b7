"""A watchdog for async code that blocks its event loop, which stops every other call and every time-out.

asyncio notices such code only when it has ended, so a thread checks the loop while there are calls.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from pathlib import Path
from types import CodeType

from loguru import logger

from dataflow.usercode.load import user_frame

AFTER_S = 5.0
"""Seconds after which a blocked loop is reported."""


class Watchdog:
    """Logs which async function blocks the event loop, and where.

    Args:
        loop: the running loop; this object must be created in its thread.
        calls: the running calls; the thread ends when there are none.
        within: the code that calls user code on the loop; only code below it is reported.
        after_s: how long the loop may be blocked.
        log: takes the message.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        calls: Collection[object],
        within: CodeType,
        after_s: float = AFTER_S,
        log: Callable[[str], None] = logger.error,
    ) -> None:
        self._loop = loop
        self._calls = calls
        self._within = within
        self._after_s = after_s
        self._log = log
        self._thread = threading.get_ident()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._watching = False

    def watch(self) -> None:
        """Starts the thread unless it is running; called at the start of a call."""
        with self._lock:
            if self._watching:
                return
            self._watching = True
        threading.Thread(target=self._work, name="reward-watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(self._after_s):
            with self._lock:
                if not self._calls:
                    self._watching = False
                    return
            served = threading.Event()
            try:
                self._loop.call_soon_threadsafe(served.set)
            except RuntimeError:  # the loop is closed
                return
            still_s = 0.0
            while not served.wait(wait_s := max(self._after_s, still_s)):
                if self._closed.is_set() or self._loop.is_closed():
                    return
                still_s += wait_s
                self._report(still_s)

    def _report(self, still_s: float) -> None:
        frames = traceback.walk_stack(sys._current_frames().get(self._thread))
        stack = [frame for frame, _line in frames][::-1]
        codes = [frame.f_code for frame in stack]
        user = user_frame(stack[codes.index(self._within) + 1 :]) if self._within in codes else None
        if user is None:
            return
        where = f"'{user.f_code.co_name}' ({Path(user.f_code.co_filename).name}:{user.f_lineno})"
        self._log(
            f"{where} has blocked the event loop for {still_s:.0f} s: meanwhile no other call runs, and no time-out "
            "takes effect. Await what it waits for, or write it as a plain def, which runs in a thread."
        )
