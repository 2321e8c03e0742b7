"""The sentinel: a process that ends this one when user code freezes it.

A function that keeps Python's lock (a regular expression that backtracks, a C extension) stops every thread of its
process, with the event loop and the signal handlers. Only another process can detect that. The sentinel reads from a
page of shared memory which thread runs which call, records the responsible sample, and ends the process. A restarted
reward agent fails that sample by the failure rule (:mod:`dataflow.rewards.ledger.frozen_calls`).

The sentinel's side is process.py.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.errors import RunError
from dataflow.system.supervisor import channel
from dataflow.usercode.failures import Delegating
from dataflow.usercode.load import MACHINERY
from dataflow.usercode.sentinel import process as sentinel_process
from dataflow.usercode.sentinel.process import LOCK_ONLY, MARK, SLOT, THREAD

Step = int | str

_SLOTS = 1 << 14  # threads that fit into the page
_IDLE = bytes(8)
# The mark of the event loop's thread, which has the first slot, and in it the number of the call.
_LOOP_MARK = slice(THREAD.size, SLOT.size)
_LOOP_CALL = slice(THREAD.size, THREAD.size + 8)
_CLOSE_S = 5.0
# For the dumps of several sentinels in one process (of rewards, of tools); libraries do not use these.
_free_signals = [int(first) + n for n in range(15, 11, -1) if (first := getattr(signal, "SIGRTMIN", None)) is not None]


class Kind:
    """The kinds of calls in marks."""

    SCORE = 1
    POST_PROCESS = 2
    LOG = 3
    TOOL = 4


@dataclass(frozen=True)
class Watched:
    """What a sentinel watches, in the words of its messages.

    Attributes:
        service: whose process it is.
        function: a call whose function is not known.
        key: configuration key of ``after_s``.
        lock_fix: what to do about a function that keeps Python's lock.
        loop_fix: what to do about one that blocks the event loop.
    """

    service: str
    function: str
    key: str
    lock_fix: str
    loop_fix: str


REWARDS = Watched(
    service="reward agent",
    function="a reward function",
    key="reward.frozen_after",
    lock_fix="run it in processes of its own with reward.manager=remote",
    loop_fix="await what it waits for, write it as a plain def, or set reward.manager=remote",
)
TOOLS = Watched(
    service="tools",
    function="a tool",
    key="tools.frozen_after",
    lock_fix="call it in a process of its own, with a time-out (subprocess)",
    loop_fix="await what it waits for, or write it as a plain def",
)


class Sentinel:
    """Starts the sentinel's process, answers its pings and marks the calls that run in each thread.

    Args:
        after_s: seconds for which user code may freeze this process; with None only signals end a frozen process.
        record: file that the responsible calls are appended to; None records none.
        inline: whether this is the run's own process, which SIGINT and SIGTERM end even while it is frozen.
        watched: what it watches.
        reason: file for the reason of the process's end, which its executor reads; None writes none.
    """

    def __init__(
        self,
        after_s: float | None,
        record: str | Path | None,
        inline: bool,
        watched: Watched = REWARDS,
        reason: str | None = None,
    ) -> None:
        self.watched = watched
        self._reason = reason
        self.after_s = after_s
        self._record = None if record is None else str(record)
        self._inline = inline
        self._local = threading.local()
        self._slots = itertools.count(1)
        self._calls = itertools.count(1)
        self._names: dict[str, int] = {}
        self._closed = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Id of the sentinel's process; None if it does not run."""
        return None if self._process is None else self._process.pid

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the process; called in the thread of the loop.

        Raises:
            RunError: it cannot be started.
        """
        try:
            self._start(loop)
        except OSError as error:
            why = error.strerror or error
            raise RunError(
                f"{self.watched.service}: the process that watches for frozen calls cannot be started ({why}); make "
                f"room in {tempfile.gettempdir()}, or set {self.watched.key}=0 to run without it."
            ) from error

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(_SLOTS * SLOT.size)
            self._page = mmap.mmap(file.fileno(), _SLOTS * SLOT.size)
            self._assign(0)
            self._loop = loop
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            dump, self._dump = os.pipe()
            number = self._register_dump()
            wakes = getattr(loop, "_ssock", None) if self._inline else None  # asyncio writes each signal to it
            options = {
                "pid": os.getpid(),
                "socket": theirs.fileno(),
                "page": file.fileno(),
                "dump": dump,
                "signal": number,
                "wakes": None if wakes is None else wakes.fileno(),
                "after_s": self.after_s,
                "record": self._record,
                "reason": self._reason,
                "watched": asdict(self.watched),
                "inline": self._inline,
                "channel": channel(),
                "machinery": MACHINERY,
                "ours": str(Path(__file__).parents[2]) + os.sep,
            }
            fds = [
                options[name] for name in ("socket", "page", "dump", "wakes", "channel") if options[name] is not None
            ]
            # By file and isolated, so that it imports nothing from the working directory.
            command = [sys.executable, "-I", "-S", sentinel_process.__file__, json.dumps(options)]
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
                )
            finally:
                theirs.close()
                os.close(dump)
        threading.Thread(target=self._answer, name="sentinel", daemon=True).start()

    def _register_dump(self) -> int | None:
        """Registers a signal that dumps the stacks of all threads without Python's lock; returns the signal."""
        self._signal = _free_signals.pop() if _free_signals else None
        if self._signal is not None:
            faulthandler.register(self._signal, file=self._dump, all_threads=True, chain=False)
        return self._signal

    def _answer(self) -> None:
        """Answers each ping from this thread, which needs the lock, and from the event loop if it asks that, too."""
        with suppress(OSError):  # it was closed
            while ping := self._socket.recv(64):
                self._socket.send(b"g" + ping)
                if ping.startswith(LOCK_ONLY):
                    continue
                try:
                    self._loop.call_soon_threadsafe(self._send, b"l" + ping)
                except RuntimeError:  # a loop that is closed is not frozen
                    self._send(b"l" + ping)
        if not self._closed:
            logger.warning(
                f"{self.watched.service}: the process that watches for frozen calls has ended, so that "
                f"{self.watched.function} that keeps Python's lock is no longer detected; check what ended it."
            )

    def _send(self, message: bytes) -> None:
        with suppress(OSError):
            self._socket.send(message, socket.MSG_DONTWAIT)

    def close(self) -> None:
        """Ends the process. May be called twice."""
        if self._closed or self._process is None:
            self._closed = True
            return
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        if self._signal is not None:
            faulthandler.unregister(self._signal)
            _free_signals.append(self._signal)
        os.close(self._dump)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # --- marks ----------------------------------------------------------------------------------------

    def mark(self, kind: int, step: Step, group: int, sample: int = -1, key: bytes | None = None) -> bytes:
        """Returns the mark of a call.

        Args:
            kind: see :class:`Kind`.
            step, group: as submitted.
            sample: as submitted; -1 for calls of a whole group.
            key: of the request, if it has one.
        """
        if isinstance(step, str):
            number = self._names.get(step)
            if number is None:
                number = self._names[step] = -1 - len(self._names)
                self._send(b"s" + json.dumps([number, step]).encode())
        else:
            number = int(step)
        return MARK.pack(next(self._calls), kind, number, int(group), sample, (key or b"")[:8])

    def _assign(self, slot: int) -> int:
        """Assigns a slot to this thread; returns the offset of its mark."""
        at = slot * SLOT.size
        self._page[at : at + THREAD.size] = THREAD.pack(threading.get_native_id(), threading.get_ident())
        self._local.at = at + THREAD.size
        return at + THREAD.size

    def enter(self, mark: bytes) -> None:
        """Marks that this thread enters user code."""
        try:
            at = self._local.at
        except AttributeError:
            slot = next(self._slots)
            at = self._local.at = self._assign(slot) if slot < _SLOTS else None
        if at is not None:
            self._page[at : at + MARK.size] = mark

    def leave(self) -> None:
        """Marks that this thread has left user code."""
        at = self._local.at
        if at is not None:
            self._page[at : at + 8] = _IDLE

    @contextmanager
    def inside(self, mark: bytes) -> Iterator[None]:
        """Marks the block as user code."""
        self.enter(mark)
        try:
            yield
        finally:
            self.leave()

    def stepped(self, coroutine: Coroutine[Any, Any, Any], mark: bytes) -> Stepped:
        """Returns a coroutine that is marked while it runs, but not while it is suspended."""
        return Stepped(coroutine, self._page, mark)


class Stepped(Delegating):
    """A coroutine of user code that is marked in each of its steps on the event loop."""

    __slots__ = ("_mark", "_page")

    def __init__(self, inner: Coroutine[Any, Any, Any], page: mmap.mmap, mark: bytes) -> None:
        super().__init__(inner)
        self._page = page
        self._mark = mark

    def send(self, value: Any) -> Any:
        page = self._page
        page[_LOOP_MARK] = self._mark
        try:
            return super().send(value)
        finally:
            page[_LOOP_CALL] = _IDLE

    def throw(self, *raised: Any) -> Any:
        page = self._page
        page[_LOOP_MARK] = self._mark
        try:
            return super().throw(*raised)
        finally:
            page[_LOOP_CALL] = _IDLE
