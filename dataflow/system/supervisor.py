"""The parent process of a run: reports its end if the run cannot do so itself, and ends all its processes.

``dataflow run`` forks before heavy imports, and the child executes the run. Ray's C++ library ends that process when it
loses the raylet or the GCS, and the kernel may kill it, so the child cannot always report its own end. The parent
forwards signals, kills processes that do not end, completes the run's summary and prints one sentence if the child has
not. All processes of the run are descendants of the parent, which is also their subreaper (PR_SET_CHILD_SUBREAPER), so
it finds them without knowing their names. If the parent is killed, the child gets SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dataflow.system.stopping import SIGNALS, stopping

if TYPE_CHECKING:
    import asyncio

_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)
STARTING_S = 4.0
"""Seconds that a stopped run may take to close before its first task, when there is nothing to save."""
CLOSING_S = 15.0
"""Seconds that a stopped run may take to close after its first task, and any run to exit after it has reported."""
SECOND_S = 0.3
"""Seconds after which another signal counts as a second one, not as the same one sent to process and group."""
LOST_S = 0.5
"""Seconds that a run has to end by itself after one of the :data:`VITAL` processes has died."""
ENDING_S = 0.5
"""Seconds that the processes of a successful run have to end by themselves."""
SIGNALLED_S = 1.0
"""Seconds that the processes which a run has left have to end after each signal that they get."""
VITAL = {"raylet": "raylet", "gcs_server": "GCS"}
"""Ray's processes that a run cannot continue without: by Ray's key, the name in its documentation."""
_TRACKER = "resource_tracker"
"""Ends by itself once it has removed the shared memory of the processes that were killed."""

Summarise: TypeAlias = Callable[[Path, str, int | None], str]
"""Given a run's directory, status and steps, writes its summary if there is none; returns how far it came."""

_channel: int | None = None


def report(**facts: Any) -> None:
    """Sends facts about this run to its supervisor; has no effect in a process without one.

    Args:
        facts: ``directory`` and ``steps`` of the run; ``training``: it has begun; ``grace``: seconds that a stopped
            run takes to save a checkpoint; ``ray``: "started" or "closing"; ``daemon``: name and id of one of the
            :data:`VITAL` processes; ``logs``: directory of Ray's logs; ``temporary``: a file or directory to remove
            after the run (may be sent repeatedly); ``done``: the exit code, sent last.
    """
    if _channel is not None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor was killed, so SIGTERM follows
            os.write(_channel, (json.dumps(facts) + "\n").encode())


def can_supervise() -> bool:
    """Whether this process may fork and the system supports the supervisor."""
    alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and alone


def supervise(work: Callable[[], int], finish: Summarise) -> int:
    """Runs ``work``, which returns an exit code, in a child process; returns that code in both processes."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    receives, sends = os.pipe()
    parent = os.getpid()
    _prctl(_SUBREAPER, 1)
    # Signals stay pending until the handlers are installed.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    child = os.fork()
    if child == 0:
        os.close(receives)
        return _supervised(work, parent, sends)
    os.close(sends)
    import asyncio  # 50 ms, in which the child begins its own imports

    async def watched() -> int:
        return await _Supervisor(child, receives).run(finish)

    return asyncio.run(watched())


def _supervised(work: Callable[[], int], parent: int, channel: int) -> int:
    """Runs ``work`` in the child."""
    global _channel
    _channel = channel
    code = 1
    with stopping:
        stopping.supervised_by(parent)
        _prctl(_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return code  # the parent was killed before prctl
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
            code = work()
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            code = stopping.exit_code
        finally:
            # In case of an unexpected error, before its traceback.
            report(done=code)
    # Ignore signals from here on: the supervisor limits the time of the exit.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    return code


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _Supervisor:
    """Waits for a run's process and its descendants; ``channel`` is the file descriptor of its reports."""

    def __init__(self, child: int, channel: int) -> None:
        import asyncio

        self._child = child
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._ended, self._alone = asyncio.Event(), asyncio.Event()  # the run's process, all its processes
        self._facts: dict[str, Any] = {}
        self._temporary: list[Path] = []
        self._partial = b""
        self._status: int | None = None
        self._stopped: signal.Signals | None = None
        self._stopped_at = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._lost = ""
        self._killed = False

    async def run(self, finish: Summarise) -> int:
        """Waits until no process of the run is left, and completes its summary; returns the exit code."""
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
                self._loop.add_signal_handler(number, self._stop, number)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        os.set_blocking(self._channel, False)
        self._loop.add_reader(self._channel, self._read)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        self._reap()
        await self._ended.wait()
        self._read()
        await self._end_all()
        # Only the final sentence remains, and the exit.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        return self._conclude(finish)

    # --- events -------------------------------------------------------------------------------------------

    def _stop(self, number: signal.Signals) -> None:
        now = self._loop.time()
        if self._stopped is None:
            self._stopped, self._stopped_at = number, now
            self._read()
            self._kill_in(CLOSING_S if "training" in self._facts else STARTING_S)
            self._signal(number)
        elif now - self._stopped_at >= SECOND_S:
            self._kill()

    def _kill_in(self, seconds: float) -> None:
        """Kills the run's process after ``seconds``, unless it is to be killed earlier."""
        at = self._loop.time() + seconds
        if self._deadline is None or at < self._deadline.when():
            self._extend(seconds)

    def _extend(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self._loop.call_later(seconds, self._kill)

    def _kill(self) -> None:
        self._killed = self._killed or self._status is None
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._status is None:  # the id may be reused once the child is reaped
            os.kill(self._child, number)

    def _reap(self) -> None:
        """Reaps the children that have ended."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._child:
                    self._status = status
                    self._ended.set()
        except ChildProcessError:
            self._alone.set()

    def _read(self) -> None:
        """Reads the reports of the child that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._channel, 65536):
                *lines, self._partial = (self._partial + data).split(b"\n")
                for line in lines:
                    self._on_facts(json.loads(line))
            self._loop.remove_reader(self._channel)  # at its end it would stay readable

    def _on_facts(self, facts: dict[str, Any]) -> None:
        if "temporary" in facts:
            self._temporary.append(Path(facts.pop("temporary")))
        self._facts |= facts
        if "grace" in facts:
            self._extend(facts["grace"] + CLOSING_S)
        if "daemon" in facts:
            name, pid = facts["daemon"]
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._lose(VITAL[name])
            else:
                self._loop.add_reader(fd, self._daemon_ended, VITAL[name], fd)
        if "done" in facts:
            self._kill_in(CLOSING_S)

    def _daemon_ended(self, name: str, fd: int) -> None:
        self._loop.remove_reader(fd)
        os.close(fd)
        self._read()  # a closing run reports so before it ends Ray
        self._lose(name)

    def _lose(self, name: str) -> None:
        if self._facts.get("ray") == "started" and not self._lost:
            self._lost = name
            self._kill_in(LOST_S)

    # --- the end ------------------------------------------------------------------------------------------------

    async def _end_all(self) -> None:
        """Ends all remaining processes of the run."""
        if self._facts.get("done") == 0 and await self._alone_within(ENDING_S):
            return
        # In the end more than once: a process may have forked meanwhile.
        for number, spared in ((signal.SIGTERM, ""), (signal.SIGKILL, _TRACKER), *[(signal.SIGKILL, "")] * 3):
            self._signal_all(number, spared)
            if await self._alone_within(SIGNALLED_S):
                return

    def _signal_all(self, number: signal.Signals, spared: str) -> None:
        """Signals all processes but those with a word in their command."""
        import psutil

        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if not spared or spared not in " ".join(process.cmdline()):
                    process.send_signal(number)

    async def _alone_within(self, seconds: float) -> bool:
        """Waits until no process of the run is left; returns False after ``seconds``."""
        import asyncio

        try:
            await asyncio.wait_for(self._alone.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _conclude(self, finish: Summarise) -> int:
        """Removes temporary files, completes the summary and prints the end; returns the exit code."""
        for path in self._temporary:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        code = self._facts.get("done")
        directory = Path(self._facts["directory"]) if "directory" in self._facts else None
        status = "failed" if self._stopped is None else "interrupted"
        ended = ""
        if code != 0 and directory is not None and directory.is_dir():
            ended = finish(directory, status, self._facts.get("steps"))
        if code is not None:
            return int(code)
        if self._stopped is not None:
            code, text = 128 + self._stopped, f"\ninterrupted{': ' if ended else ''}{ended}"
        else:
            code, text = 1, f"RunError: {self._what_died()}; {f'it {ended}' if ended else 'run it again'}."
        with contextlib.suppress(OSError):  # the terminal is closed
            shown = "\x1b[?25h" if sys.stderr.isatty() else ""  # the cursor, which the live view hides
            print(f"{shown}{text}", file=sys.stderr, flush=True)
        return code

    def _what_died(self) -> str:
        assert self._status is not None
        code = os.waitstatus_to_exitcode(self._status)
        # If the run's process was killed by others, Ray died because of that.
        if self._lost and (self._killed or code != -signal.SIGKILL):
            logs = self._facts["logs"]
            return (
                f"Ray's {self._lost} died (killed, or out of memory), without which the run cannot continue (Ray's "
                f"logs are in {logs})"
            )
        if code < 0:
            name = signal.Signals(-code).name
            return f"the run's process was killed by {name} ({'out of memory?' if name == 'SIGKILL' else 'a crash'})"
        what = f"the run's process ended with exit code {code} before the run did"
        if "logs" in self._facts:
            return f"{what}, as Ray ends it when its raylet or GCS dies (Ray's logs are in {self._facts['logs']})"
        return f"{what} (does its code, or a library, call os._exit?)"
