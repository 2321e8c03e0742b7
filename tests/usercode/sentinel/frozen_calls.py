"""A program of which a call freezes the process: run as ``python frozen_calls.py FUNCTION RECORD AFTER_S [RUN]``.

With RUN, a directory to be made, it has a supervisor, as ``dataflow run`` has.

It prints ``frozen`` when that call has begun. The other calls are in user code, too, and wait.
"""

from __future__ import annotations

import asyncio
import ctypes
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from dataflow.running.remains import finish_killed
from dataflow.system.supervisor import report, supervise
from dataflow.usercode.calls import Calls
from dataflow.usercode.sentinel.sentinel import Kind, Sentinel

in_time = threading.Barrier(3)


loops: list[asyncio.AbstractEventLoop] = []


def keep_the_lock() -> None:
    # Unlike sleep(), locking a locked mutex does not return when a signal comes: the sentinel sends some.
    library, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


def spin() -> None:
    print("frozen", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")


def backtracks(bad: bool) -> None:
    in_time.wait()
    if bad:
        spin()
    time.sleep(0.01)


def waits_in_c(bad: bool) -> None:
    in_time.wait()
    if bad:
        print("frozen", flush=True)
        keep_the_lock()
    time.sleep(0.01)


def waits_in_c_behind_a_busy_loop(bad: bool) -> None:
    in_time.wait()
    if bad:
        # A ping comes while the loop is busy: the thread answers it, and the loop no more.
        loops[0].call_soon_threadsafe(time.sleep, 3)
        time.sleep(1.5)
        print("frozen", flush=True)
        keep_the_lock()
    time.sleep(0.01)


async def backtracks_on_the_loop(bad: bool) -> None:
    await asyncio.sleep(0.01)
    if bad:
        spin()
    await asyncio.sleep(1000)


async def backtracks_in_a_task(bad: bool) -> None:
    await asyncio.create_task(backtracks_on_the_loop(bad))


async def blocks_the_loop(bad: bool) -> None:
    await asyncio.sleep(0.01)
    if bad:
        print("frozen", flush=True)
        time.sleep(1000)
    await asyncio.sleep(1000)


def starts_a_program(bad: bool) -> None:
    if bad:
        child = subprocess.Popen(["sleep", "1000"])
        print(child.pid, flush=True)
        spin()


async def main(function: str, record: str, after_s: float | None) -> None:
    loop = asyncio.get_running_loop()
    loops.append(loop)
    for number in (signal.SIGINT, signal.SIGTERM):  # as a run does
        loop.add_signal_handler(number, lambda: None)
    sentinel = Sentinel(after_s, record, inline=True)
    sentinel.start(loop)
    calls = Calls(lambda _strays: None, lambda error: print(error), sentinel)
    for sample in range(3):
        mark = sentinel.mark(Kind.SCORE, "val:3", 7, sample, b"12345678rest" if function == "backtracks" else None)
        ignore = {"on_done": lambda call: None, "on_freed": lambda call: None}
        calls.start(globals()[function], {"bad": sample == 1}, mark=mark, **ignore)  # type: ignore[arg-type]
    await asyncio.sleep(1000)


def work() -> int:
    for run in sys.argv[4:]:
        Path(run).mkdir()
        report(directory=run, steps=7, training=True)
    asyncio.run(main(sys.argv[1], sys.argv[2], float(sys.argv[3]) if sys.argv[3] else None))
    return 0


if __name__ == "__main__":
    sys.exit(supervise(work, finish_killed) if sys.argv[4:] else work())
