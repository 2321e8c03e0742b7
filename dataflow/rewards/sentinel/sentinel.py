"""The sentinel: a process beside the agent's that ends it when user code freezes it.

A function that keeps Python's interpreter lock (a regular expression that backtracks, a C extension) stops every
thread of its process, the event loop and the handlers of signals with it. Only another process can see that. It reads
who runs what from a page of shared memory, writes down which sample is to blame, and ends the agent's process; the
agent that is built anew fails that sample by the failure rule (:mod:`dataflow.rewards.sentinel.frozen`).

The other side is sentinel_process.py.
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
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from loguru import logger

from dataflow.cluster.process import DEATH_REASON
from dataflow.errors import RunError
from dataflow.rewards.requests import Step
from dataflow.rewards.sentinel import process as sentinel_process
from dataflow.rewards.sentinel.process import MARK, SLOT, THREAD
from dataflow.usercode.load import MACHINERY

_SLOTS = 1 << 14  # threads that are seen
_IDLE = bytes(8)
# The mark of the event loop's thread, whose slot is the first, and within it the number of the call.
_LOOPS = slice(THREAD.size, SLOT.size)
_LOOPS_CALL = slice(THREAD.size, THREAD.size + 8)
_CLOSE_S = 5.0


class Kind:
    """What a mark says to run."""

    SCORE = 1
    POST_PROCESS = 2
    LOG = 3


class Sentinel:
    """Tells a process of its own that this one is alive, and what runs in each thread.

    Args:
        after_s: how long user code may keep everything else from running; None only lets signals end a frozen process.
        record: file in which samples to blame are written down; None writes none.
        inline: whether this is the process of the run itself: SIGINT and SIGTERM then end it while it is frozen.
    """

    def __init__(self, after_s: float | None, record: str | Path | None, inline: bool) -> None:
        self._after_s = after_s
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
        """Of the process, where it runs."""
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
                f"reward agent: the process that watches for frozen calls cannot be started ({why}); make room in "
                f"{tempfile.gettempdir()}, or set reward.frozen_after=0 to run without it."
            ) from error

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        with tempfile.TemporaryFile() as file:
            file.truncate(_SLOTS * SLOT.size)
            self._page = mmap.mmap(file.fileno(), _SLOTS * SLOT.size)
            self._settle(0)
            self._loop = loop
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            dump, self._dump = os.pipe()
            number = self._dumps()
            wakes = getattr(loop, "_ssock", None) if self._inline else None  # asyncio writes each signal to it
            options = {
                "pid": os.getpid(),
                "socket": theirs.fileno(),
                "page": file.fileno(),
                "dump": dump,
                "signal": number,
                "wakes": None if wakes is None else wakes.fileno(),
                "after_s": self._after_s,
                "record": self._record,
                "words": os.environ.get(DEATH_REASON),
                "inline": self._inline,
                "machinery": MACHINERY,
                "ours": str(Path(__file__).parents[2]) + os.sep,
            }
            fds = [options[name] for name in ("socket", "page", "dump", "wakes") if options[name] is not None]
            # By file and isolated: what lies in the working directory is not its to run.
            command = [sys.executable, "-I", "-S", sentinel_process.__file__, json.dumps(options)]
            try:
                self._process = subprocess.Popen(
                    command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True
                )
            finally:
                theirs.close()
                os.close(dump)
        threading.Thread(target=self._answer, name="reward-sentinel", daemon=True).start()

    def _dumps(self) -> int | None:
        """Has the stacks of all threads written for a signal, by code that needs no lock; returns the signal."""
        first = getattr(signal, "SIGRTMIN", None)
        if first is None:
            return None
        number = int(first) + 12  # one that nobody else uses
        faulthandler.register(number, file=self._dump, all_threads=True, chain=False)
        return number

    def _answer(self) -> None:
        """Answers each question: at once, which takes the lock, and by the event loop."""
        with suppress(OSError):  # it was closed
            while question := self._socket.recv(64):
                self._socket.send(b"g" + question)
                try:
                    self._loop.call_soon_threadsafe(self._send, b"l" + question)
                except RuntimeError:  # a loop that is closed is not frozen
                    self._send(b"l" + question)
        if not self._closed:
            logger.warning(
                "reward sentinel: its process has ended, so that a reward function that keeps Python's lock is not "
                "noticed any more; see what ended it."
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
        if (first := getattr(signal, "SIGRTMIN", None)) is not None:
            faulthandler.unregister(int(first) + 12)
        os.close(self._dump)
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # --- what runs ----------------------------------------------------------------------------------------

    def mark(self, kind: int, step: Step, group: int, sample: int = -1, key: bytes | None = None) -> bytes:
        """Returns what the page is to say while a call runs.

        Args:
            kind: of the call, see :class:`Kind`.
            step: as submitted.
            group: likewise.
            sample: likewise; -1 for calls that are of a whole group.
            key: of the request, if there is one.
        """
        if isinstance(step, str):
            number = self._names.get(step)
            if number is None:
                number = self._names[step] = -1 - len(self._names)
                self._send(b"s" + json.dumps([number, step]).encode())
        else:
            number = int(step)
        return MARK.pack(next(self._calls), kind, number, int(group), sample, (key or b"")[:8])

    def _settle(self, slot: int) -> int:
        """Gives this thread a slot of the page; returns where its mark is."""
        at = slot * SLOT.size
        self._page[at : at + THREAD.size] = THREAD.pack(threading.get_native_id(), threading.get_ident())
        self._local.at = at + THREAD.size
        return at + THREAD.size

    def enter(self, mark: bytes) -> None:
        """This thread goes into user code."""
        try:
            at = self._local.at
        except AttributeError:
            slot = next(self._slots)
            at = self._local.at = self._settle(slot) if slot < _SLOTS else None
        if at is not None:
            self._page[at : at + MARK.size] = mark

    def leave(self) -> None:
        """This thread comes out of it."""
        at = self._local.at
        if at is not None:
            self._page[at : at + 8] = _IDLE

    @contextmanager
    def inside(self, mark: bytes) -> Iterator[None]:
        """Marks what runs within."""
        self.enter(mark)
        try:
            yield
        finally:
            self.leave()

    def stepped(self, coroutine: Coroutine[Any, Any, Any], mark: bytes) -> Stepped:
        """Returns a coroutine that is marked while it runs, not while it waits."""
        return Stepped(coroutine, self._page, mark)


class Stepped(Coroutine[Any, Any, Any]):
    """A coroutine of user code, marked whenever it runs on the event loop."""

    __slots__ = ("_inner", "_mark", "_page", "_send")

    def __init__(self, inner: Coroutine[Any, Any, Any], page: mmap.mmap, mark: bytes) -> None:
        self._inner = inner
        self._send = inner.send
        self._page = page
        self._mark = mark

    def send(self, value: Any) -> Any:
        page = self._page
        page[_LOOPS] = self._mark
        try:
            return self._send(value)
        finally:
            page[_LOOPS_CALL] = _IDLE

    def throw(self, *raised: Any) -> Any:
        page = self._page
        page[_LOOPS] = self._mark
        try:
            return self._inner.throw(*raised)
        finally:
            page[_LOOPS_CALL] = _IDLE

    def close(self) -> None:
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()
