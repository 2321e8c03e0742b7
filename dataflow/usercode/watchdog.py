"""A watchdog for async code that holds up its event loop: every other call stands still then, and every time-out.

asyncio sees such code only once it is over; so a thread looks. It lives while there are calls.
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
"""How long a loop may stand still before it is said."""


class Watchdog:
    """Says in the log which async function does not let go of the event loop, and where.

    Args:
        loop: the running one, in whose thread this is made.
        calls: what runs now; empty ends the thread.
        within: the code that user code on the loop is called by: what else holds up a loop is not the user's.
        after_s: how long it may stand still.
        say: takes the message.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        calls: Collection[object],
        within: CodeType,
        after_s: float = AFTER_S,
        say: Callable[[str], None] = logger.error,
    ) -> None:
        self._loop = loop
        self._calls = calls
        self._within = within
        self._after_s = after_s
        self._say = say
        self._of = threading.get_ident()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._looks = False

    def look(self) -> None:
        """There is a call."""
        with self._lock:
            if self._looks:
                return
            self._looks = True
        threading.Thread(target=self._work, name="reward-watchdog", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def _work(self) -> None:
        while not self._closed.wait(self._after_s):
            with self._lock:
                if not self._calls:
                    self._looks = False
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
                self._found(still_s)

    def _found(self, still_s: float) -> None:
        frames = traceback.walk_stack(sys._current_frames().get(self._of))
        stack = [frame for frame, _line in frames][::-1]
        codes = [frame.f_code for frame in stack]
        user = user_frame(stack[codes.index(self._within) + 1 :]) if self._within in codes else None
        if user is None:
            return
        where = f"'{user.f_code.co_name}' ({Path(user.f_code.co_filename).name}:{user.f_lineno})"
        self._say(
            f"{where} has held up the event loop for {still_s:.0f} s: meanwhile no other call goes on, and no time-out "
            "can end it. Await what it waits for there, or write it as a plain def, which runs in a thread."
        )
