"""The parent process of a run: reports its end if the run cannot do so itself, and ends all its processes.

``dataflow run`` forks before heavy imports, and the child executes the run. Ray's C++ library ends that process when it
loses the raylet, and the kernel may kill it, so the child cannot always report its own end. The parent forwards
signals, kills processes that do not end, completes the run's summary and prints one sentence if the child has not. All
processes of the run are descendants of the parent, which is also their subreaper (PR_SET_CHILD_SUBREAPER), so it finds
them without knowing their names. If the parent is killed, the child gets SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from dataflow.system.stopping import SIGNALS, stopping
from dataflow.system.streams import open_standard_streams

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
VITAL = {"raylet": "raylet", "gcs_server": "GCS"}
"""Ray's processes that a run cannot continue without: by Ray's key, the name in its documentation."""

Summarise: TypeAlias = Callable[[Path, str, int | None], str]
"""Given a run's directory, status and steps, writes its summary if there is none; returns how far it came."""

SHOW_CURSOR = "\x1b[?25h"
_TRACKER, _REMOVER = "resource_tracker", "dataflow.engines.servers.weights_remover"
_REMOVAL_S = 20.0  # for the files of a large model
_PF_EXITING = 4
"""Flag of a process in the kernel (include/linux/sched.h) as /proc/PID/stat shows it."""

_channel: int | None = None


def report(**facts: Any) -> None:
    """Sends facts about this run to its supervisor; has no effect in a process without one.

    Args:
        facts: ``directory`` and ``steps`` of the run; ``training``: it has begun; ``grace``: seconds that a stopped
            run takes to save a checkpoint; ``ray``: "started" or "closing"; ``daemon``: name and id of a process of
            Ray that has been started; ``logs``: directory of Ray's logs;
            ``temporary``: a file or directory to remove if this process dies (may be sent repeatedly); ``done``: the
            exit code, sent last.
    """
    if _channel is not None:
        with contextlib.suppress(BrokenPipeError):  # the supervisor was killed, so SIGTERM follows
            os.write(_channel, (json.dumps(facts) + "\n").encode())


def can_supervise() -> bool:
    """Whether this process may fork and the system supports the supervisor."""
    alone = threading.active_count() == 1 and threading.current_thread() is threading.main_thread()
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and alone


def supervise(work: Callable[[], int], finish: Summarise) -> int:
    """Runs ``work`` in a child process under a supervisor.

    Args:
        work: returns an exit code.
        finish: completes the summary; see :data:`Summarise`.

    Returns:
        The exit code, in both processes.
    """
    open_standard_streams()
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
    return Supervisor(child, receives, finish).run()


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


class Supervisor:
    """Waits for a run's process and its descendants.

    Args:
        child: its process id.
        channel: file descriptor of its reports; see :func:`report`.
        finish: see :func:`supervise`.
    """

    def __init__(self, child: int, channel: int, finish: Summarise) -> None:
        self._child = child
        self._channel = channel
        self._finish = finish
        self._facts: dict[str, Any] = {}
        self._temporary: list[Path] = []
        self._partial = b""
        self._status: int | None = None
        self._stopped: signal.Signals | None = None
        self._stopped_at = 0.0
        self._deadline: float | None = None
        self._lost = ""
        self._cut = False
        self._selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Waits until no process of the run is left; returns the exit code."""
        os.set_blocking(self._channel, False)
        with self._selector, self._woken():
            self._selector.register(self._channel, selectors.EVENT_READ, self._read)
            self._reap()
            while self._status is None:
                timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                for key, _events in self._selector.select(timeout):
                    key.data()
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    self._deadline = None
                    self._cut_off()
            self._read()
            self._end_all()
        return self._conclude()

    @contextlib.contextmanager
    def _woken(self) -> Iterator[None]:
        """Makes signals readable on the selector."""
        receives, sends = os.pipe()
        for end in (receives, sends):
            os.set_blocking(end, False)
        wakeup = signal.set_wakeup_fd(sends, warn_on_full_buffer=False)
        before = {n: signal.getsignal(n) for n in (*SIGNALS, signal.SIGCHLD)}
        for number, handler in before.items():
            if handler != signal.SIG_IGN or number == signal.SIGCHLD:
                signal.signal(number, lambda *_: None)
        self._selector.register(receives, selectors.EVENT_READ, partial(self._signals, receives))
        self._wakeup = receives
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number in SIGNALS:
                # All processes have ended; only the final sentence remains.
                signal.signal(number, signal.SIG_IGN)
            signal.signal(signal.SIGCHLD, before[signal.SIGCHLD])
            os.close(receives)
            os.close(sends)

    # --- events -------------------------------------------------------------------------------------------

    def _signals(self, wakeup: int) -> None:
        with contextlib.suppress(BlockingIOError):
            for number in os.read(wakeup, 4096):
                if number == signal.SIGCHLD:
                    self._reap()
                else:
                    self._stop(signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self._stopped is None:
            self._stopped, self._stopped_at = number, now
            self._read()
            self._within(CLOSING_S if "training" in self._facts else STARTING_S)
            self._signal(number)
        elif now - self._stopped_at >= SECOND_S:
            self._cut_off()

    def _cut_off(self) -> None:
        # A large process that was killed takes seconds to end; Ray's daemons may be gone before it is.
        self._cut = self._cut or not (self._status is None and _ends(self._child))
        self._signal(signal.SIGKILL)

    def _within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)

    def _signal(self, number: signal.Signals) -> None:
        if self._status is None:  # the id may be reused once the child is reaped
            os.kill(self._child, number)

    def _reap(self) -> bool:
        """Reaps the children that have ended; returns whether none is left."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return False
                if pid == self._child:
                    self._status = status
        except ChildProcessError:
            return True

    def _read(self) -> None:
        """Reads the reports of the child that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._channel, 65536):
                *lines, self._partial = (self._partial + data).split(b"\n")
                for line in lines:
                    self._on_facts(json.loads(line))
            if self._channel in self._selector.get_map():  # at its end it would stay readable
                self._selector.unregister(self._channel)

    def _on_facts(self, facts: dict[str, Any]) -> None:
        if "temporary" in facts:
            self._temporary.append(Path(facts.pop("temporary")))
        self._facts |= facts
        if "grace" in facts:
            self._deadline = time.monotonic() + facts["grace"] + CLOSING_S
        if "daemon" in facts:
            self._watch_daemon(*facts["daemon"])
        if "done" in facts:
            self._within(CLOSING_S)

    def _watch_daemon(self, name: str, pid: int) -> None:
        if name not in VITAL:
            return
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:  # it has died already
            self._daemon_died(VITAL[name])
        else:
            self._selector.register(fd, selectors.EVENT_READ, partial(self._daemon_ended, VITAL[name], fd))

    def _daemon_ended(self, name: str, fd: int) -> None:
        self._selector.unregister(fd)
        os.close(fd)
        self._read()  # a closing run reports so before it ends Ray
        self._daemon_died(name)

    def _daemon_died(self, name: str) -> None:
        if self._facts.get("ray") == "started" and not self._lost:
            self._lost = name
            self._within(LOST_S)

    # --- the end ------------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """Ends all remaining processes of the run."""
        if self._facts.get("done") == 0 and self._alone_within(ENDING_S):
            return
        self._signal_all(signal.SIGTERM)
        if self._alone_within(1.0):
            return
        # The resource tracker removes the shared memory of killed processes, the remover their weights; then they end.
        spared = self._signal_all(signal.SIGKILL, but=(_TRACKER, _REMOVER))
        if self._alone_within(_REMOVAL_S if _REMOVER in spared else 1.0):
            return
        for _round in range(3):  # a process may have forked meanwhile
            self._signal_all(signal.SIGKILL)
            if self._alone_within(1.0):
                return

    def _signal_all(self, number: signal.Signals, but: Sequence[str] = ()) -> set[str]:
        """Signals all processes but those with a word of ``but`` in their command; returns the words found."""
        import psutil

        spared: set[str] = set()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if found := {word for word in but if word in " ".join(process.cmdline())}:
                    spared |= found
                else:
                    process.send_signal(number)
        return spared

    def _alone_within(self, seconds: float) -> bool:
        """Waits until no process of the run is left; returns False after ``seconds``."""
        end = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakeup, selectors.EVENT_READ)
            while not self._reap():
                left = end - time.monotonic()
                if left <= 0:
                    return False
                if selector.select(left):
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup, 4096)
        return True

    def _conclude(self) -> int:
        """Removes temporary files, completes the summary and prints the end; returns the exit code."""
        for path in self._temporary:
            with contextlib.suppress(OSError):  # the run has removed it
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
        code = self._facts.get("done")
        directory = Path(self._facts["directory"]) if "directory" in self._facts else None
        status = "failed" if self._stopped is None else "interrupted"
        ended = self._finish(directory, status, self._facts.get("steps")) if directory and directory.is_dir() else ""
        if code is not None:
            return int(code)
        if self._stopped is not None:
            code, text = 128 + self._stopped, f"\ninterrupted{': ' if ended else ''}{ended}"
        else:
            code, text = 1, f"RunError: {self._what_died()}; {f'it {ended}' if ended else 'run it again'}."
        with contextlib.suppress(OSError):  # the terminal is closed
            # The live view hides the cursor.
            print(f"{SHOW_CURSOR if sys.stderr.isatty() else ''}{text}", file=sys.stderr, flush=True)
        return code

    def _what_died(self) -> str:
        logs = f" (Ray's logs are in {self._facts['logs']})" if "logs" in self._facts else ""
        assert self._status is not None
        killed = os.WIFSIGNALED(self._status) and os.WTERMSIG(self._status) == signal.SIGKILL and not self._cut
        # If the child was killed, Ray died because of that.
        if self._lost and not killed:
            return f"Ray's {self._lost} died (killed, or out of memory), without which the run cannot continue{logs}"
        if os.WIFSIGNALED(self._status):
            name = signal.Signals(os.WTERMSIG(self._status)).name
            return f"the run's process was killed by {name} ({'out of memory?' if name == 'SIGKILL' else 'a crash'})"
        code = os.waitstatus_to_exitcode(self._status)
        what = f"the run's process ended with exit code {code} before the run did"
        if "ray" in self._facts:
            return f"{what}, as Ray ends it when it loses its cluster{logs}"
        return f"{what} (does its code, or a library, call os._exit?)"


def _ends(pid: int) -> bool:
    """Returns whether a process is on its way to its end, even if the kernel has not freed its memory yet."""
    try:
        # Its name, in parentheses, may contain anything.
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return True
    return bool(int(after_name[6]) & _PF_EXITING)
