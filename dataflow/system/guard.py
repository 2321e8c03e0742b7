"""Runs a command, and ends it with all its processes when the process that asked for it ends, however that happens.

    python -P -m dataflow.system.guard PID COMMAND...

PID is the process that starts the guard, which holds the other end of the guard's standard input. The guard ends the
command after SIGTERM, at the end of standard input, and when that process has ended. Its exit code is the command's.
Linux only: elsewhere the end of standard input alone ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from dataflow.system.stopping import SIGNALS

GRACE_S = 2.5
"""Seconds that the command has to end after SIGTERM, before SIGKILL."""
LEFT_S = 1.0
"""Seconds that the other processes of the command have to end after it has ended, before SIGKILL."""
_PDEATHSIG, _SUBREAPER = 1, 36  # of prctl(2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the guard; returns the exit code of the command, or 128 and the number of the signal that ended it."""
    pid, *command = sys.argv[1:] if arguments is None else arguments
    _prctl(_SUBREAPER, 1)  # processes of the command whose parent has ended stay the guard's to end
    wakes, wakeup = os.pipe()
    for end in (wakes, wakeup):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (*SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(wakes, selectors.EVENT_READ, "signal")
        # The command inherits standard input, too: servers of this package end with it.
        selector.register(0, selectors.EVENT_READ, "asked")
        process = subprocess.Popen(command, preexec_fn=_ends_with_guard)
        if _watch_parent(int(pid), selector):
            _wait(process, selector, wakes)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        _end_others(process, LEFT_S if process.poll() is not None else 0.0)
    code = process.wait()
    return 128 - code if code < 0 else code


def _watch_parent(pid: int, selector: selectors.BaseSelector) -> bool:
    """Makes the end of the process that started the guard an event; returns False if it has ended already."""
    if not hasattr(os, "pidfd_open"):
        return True
    try:
        selector.register(os.pidfd_open(pid), selectors.EVENT_READ, "ended")
    except ProcessLookupError:
        return False
    return os.getppid() == pid


def _wait(process: subprocess.Popen[bytes], selector: selectors.BaseSelector, wakes: int) -> None:
    """Waits until the command has ended, or is to be ended."""
    while process.poll() is None:
        for key, _events in selector.select():
            if key.data != "signal":
                return
            if any(number in SIGNALS for number in os.read(wakes, 4096)):
                return


def _end_others(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Ends what the command has started, and the command itself if it has not ended."""
    import psutil

    end = time.monotonic() + seconds
    for _round in range(5):  # a process may have forked meanwhile
        there = psutil.Process().children(recursive=True)
        _gone, alive = psutil.wait_procs(there, timeout=max(0.0, end - time.monotonic()))
        if not alive:
            return
        for each in alive:
            with contextlib.suppress(psutil.Error):
                each.kill()
        process.poll()
        end = time.monotonic() + 0.2


def _ends_with_guard() -> None:
    _prctl(_PDEATHSIG, signal.SIGTERM)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
