"""What the sentinel's process does, in this process, with a program that lies frozen: whom it blames, whom it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest

from dataflow.usercode.sentinel.process import MARK, SLOT, THREAD, Ended, Watch, descendants
from dataflow.usercode.sentinel.sentinel import REWARDS
from tests.rigs.processes import left

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(sys.platform != "linux", reason="it finds the responsible thread in /proc"),
]

AFTER_S = 0.05
OURS, MACHINERY = "/lib/ours/", "/lib/machinery/"
STACK = """Thread 0x{ident:016x} (most recent call first):
  File "/lib/machinery/re.py", line 3 in match
  File "/srv/mine.py", line 12 in stuck
  File "/lib/ours/calls.py", line 30 in call
  File "/srv/other.py", line 1 in outer
"""
WAKES = [sys.executable, "-I", "-S", "-c", "import time\nwhile True: time.sleep(0.005)"]
"""As a thread that waits for the lock."""


class Rig:
    """A watch over a program, with the other ends of all that connects them."""

    def __init__(self, place: Path, program: Sequence[str] = ("sleep", "60"), **options: Any) -> None:
        self.program = subprocess.Popen(program)
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.wakes, their_wakes = socket.socketpair()
        dump, self.dump = os.pipe()
        self.said, channel = os.pipe()
        self.record, self.reason = place / "frozen.jsonl", place / "reason"
        with tempfile.TemporaryFile() as file:
            file.truncate(4 * SLOT.size)
            self.page = mmap(file.fileno(), 0)
            self.watch = Watch(
                {
                    "pid": self.program.pid, "after_s": AFTER_S, "inline": True, "record": str(self.record),
                    "reason": str(self.reason), "watched": asdict(REWARDS), "machinery": [MACHINERY], "ours": OURS,
                    "signal": int(signal.SIGCONT), "dump": dump, "socket": theirs.detach(),
                    "wakes": their_wakes.detach(), "page": file.fileno(), "channel": channel, **options,
                }
            )  # fmt: skip
        self.fds = [dump, self.dump, self.said, channel]

    def mark(self, number: int, ident: int = 0xAB, step: int = 3, sample: int = 1) -> None:
        """Marks that a thread of the program runs a call, and lets the program say where it is when asked."""
        slot = THREAD.pack(self.program.pid, ident) + MARK.pack(number + 1, 1, step, 7, sample, b"key")
        self.page[number * SLOT.size : (number + 1) * SLOT.size] = slot
        os.write(self.dump, STACK.format(ident=ident).encode())

    def decide(self, frozen_s: float, what: str) -> bool:
        """Lets the watch decide about a freeze; returns whether it ended the program."""
        try:
            self.watch.decide(frozen_s, what)
        except Ended:
            assert self.program.wait(20) == -signal.SIGKILL
            return True
        assert self.program.poll() is None
        return False

    def answer_from_the_thread(self) -> None:
        """Answers each ping as the program's thread does, and not as its loop does."""
        with suppress(OSError):
            while ping := self.ours.recv(64):
                self.ours.send(b"g" + ping)

    def message(self) -> str:
        """Returns what the supervisor of the program reads."""
        return str(json.loads(os.read(self.said, 1 << 16))["killed"])

    def close(self) -> None:
        self.program.kill()
        self.program.wait()
        for each in (self.ours, self.wakes, self.watch.socket, self.watch.wakes):
            if each is not None:
                each.close()
        for fd in self.fds:
            with suppress(OSError):
                os.close(fd)


@pytest.fixture
def rigs(tmp_path: Path) -> Iterator[Any]:
    made: list[Rig] = []

    def make(*arguments: Any, **options: Any) -> Rig:
        made.append(Rig(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def test_a_program_that_answers_is_left_until_it_closes_the_socket(rigs: Any) -> None:
    rig = rigs()
    rig.mark(0)

    def answer() -> None:
        for _ in range(3):
            ping = rig.ours.recv(64)
            for first in (b"g", b"l"):
                rig.ours.send(first + ping)
        rig.ours.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(Ended):
        rig.watch.run()
    thread.join()
    assert rig.program.poll() is None
    assert not rig.record.exists()


def test_with_the_program_the_watch_ends(rigs: Any) -> None:
    rig = rigs(after_s=None)
    rig.program.kill()
    with pytest.raises(Ended):
        rig.watch.run()
    rig.ours.close()
    with pytest.raises(Ended):
        rig.watch.send(b"1")


def test_the_call_that_blocks_the_loop_is_named_and_recorded(rigs: Any) -> None:
    rig = rigs()
    rig.mark(0, step=-1)
    rig.ours.send(b"s" + json.dumps([-1, "val:3"]).encode())
    thread = threading.Thread(target=rig.answer_from_the_thread)
    thread.start()
    with pytest.raises(Ended):
        rig.watch.run()
    assert rig.program.wait(20) == -signal.SIGKILL
    rig.ours.shutdown(socket.SHUT_RDWR)
    thread.join()
    story = r"'stuck' \(mine\.py:12\) has blocked the event loop for \d+ s, with every other call and all time-outs"
    said = rig.message()
    begin = rf"sample 1 of group 7 of step val:3: {story} \(reward\.frozen_after\); the process was ended; "
    assert re.match(begin, said), said
    assert rig.reason.read_text() == f"{said}."
    noted = json.loads(rig.record.read_text())
    assert noted.pop("story") in f"{said}."
    assert noted == {"kind": 1, "step": "val:3", "group": 7, "sample": 1, "key": b"key".hex()}


def test_a_lock_that_is_taken_before_the_loop_has_answered_is_found(rigs: Any) -> None:
    rig = rigs()
    rig.mark(1)  # the loop, in slot 0, runs no call
    rig.page[0 : SLOT.size] = THREAD.pack(rig.program.pid, 0xCD) + bytes(MARK.size)
    rig.ours.send(b"g1")  # the thread's last answer
    with pytest.raises(Ended):
        rig.watch.run()
    assert rig.program.wait(20) == -signal.SIGKILL
    assert "'stuck' (mine.py:12) has kept Python's lock for" in rig.message()


def test_the_call_that_keeps_the_lock_is_named(rigs: Any) -> None:
    rig = rigs(record=None, reason=None, channel=None)
    rig.mark(0, sample=-1)
    assert rig.decide(4.0, "lock")
    assert not rig.record.exists()


def test_without_a_supervisor_the_reason_is_printed(rigs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    rig = rigs(channel=None, signal=None)
    rig.mark(0, sample=-1)
    assert rig.decide(4.0, "lock")
    assert capfd.readouterr().err.startswith(
        "\ndataflow: group 7 of step 3: a reward function has kept Python's lock for 4 s, so that nothing else in its "
        "process could run (reward.frozen_after); the process was ended; run it in processes of its own"
    )


def test_a_thread_that_waits_for_the_lock_is_not_blamed(rigs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    rig = rigs(WAKES)
    ready = time.monotonic() + 20
    while (rig.watch.usage(rig.program.pid) or (0,))[0] < 20:  # it has begun to wait
        assert time.monotonic() < ready
        time.sleep(0.01)
    rig.mark(0)
    assert not rig.decide(4.0, "lock")
    assert not rig.decide(5.0, "lock")
    assert capfd.readouterr().err == (
        f"\ndataflow: nothing in process {rig.program.pid} has run for 4 s, as something other than a reward function "
        "keeps Python's lock.\n"
    ), "said once"


def test_a_lock_that_is_released_meanwhile_ends_nothing(rigs: Any) -> None:
    rig = rigs()
    rig.mark(0)
    rig.ours.send(b"g1")
    assert not rig.decide(4.0, "lock")


def test_a_signal_that_is_not_read_ends_the_program(rigs: Any) -> None:
    rig = rigs(after_s=None)
    rig.wakes.send(bytes([signal.SIGCHLD]))
    assert not rig.decide(9.0, "loop")
    rig.wakes.send(bytes([signal.SIGTERM]))
    assert not rig.decide(1.9, "loop"), "it may still be handled"
    rig.mark(0)
    assert rig.decide(2.1, "loop")
    assert rig.message() == (
        "'stuck' (mine.py:12), called for sample 1 of group 7 of step 3, has blocked the event loop for 2 s, with "
        "every other call and all time-outs; the process was ended"
    )
    assert not rig.record.exists(), "the call is not to blame"


def test_a_signal_ends_a_program_whose_lock_nobody_known_keeps(rigs: Any, capfd: pytest.CaptureFixture[str]) -> None:
    rig = rigs(channel=None)
    rig.wakes.send(bytes([signal.SIGINT]))
    assert rig.decide(2.1, "lock")
    said = capfd.readouterr().err
    assert said == "\ndataflow: interrupted by SIGINT: something kept Python's lock; the process was ended.\n"


def test_signals_of_a_loop_that_is_closed_or_not_the_runs_do_not_count(rigs: Any) -> None:
    assert not rigs(wakes=None).decide(AFTER_S / 2, "lock")
    rig = rigs()
    rig.watch.wakes.close()
    assert not rig.decide(9.0, "lock")


def test_time_in_which_the_program_was_stopped_does_not_count(rigs: Any) -> None:
    rig = rigs()
    rig.mark(0)
    os.kill(rig.program.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, rig.program.pid, os.WSTOPPED | os.WNOWAIT)
    now = time.monotonic()
    rig.watch.pinged = rig.watch.checked = now - 4.0
    rig.watch.held = (1, now - 4.0)
    rig.watch.check(False, False)
    assert rig.watch.pinged >= now
    os.kill(rig.program.pid, signal.SIGCONT)
    rig.watch.pinged, rig.watch.checked = now - 60.0, now - 30.0  # the machine slept
    rig.watch.check(False, False)
    assert rig.watch.pinged >= now
    assert rig.program.poll() is None


def test_a_loop_that_is_busy_with_something_else_is_left(rigs: Any) -> None:
    rig = rigs()
    rig.watch.pinged = rig.watch.checked = time.monotonic() - 4.0
    rig.watch.held = (0, 0.0)
    rig.watch.check(True, False)  # no mark: the loop runs code of ours
    rig.watch.check(True, True)
    assert rig.program.poll() is None


def test_a_thread_that_is_not_known_may_keep_the_lock(rigs: Any) -> None:
    """As on systems that do not tell what a thread does."""
    rig = rigs()
    rig.mark(0)
    rig.page[: THREAD.size] = THREAD.pack(2**22 + 1, 0xCD)  # there is none of this number
    assert rig.watch.usage(2**22 + 1) is None
    assert rig.decide(4.0, "lock")
    assert "a reward function has kept Python's lock" in rig.message(), "its stack is not known either"


def test_what_the_program_has_started_ends_with_it_though_nobody_reads_why(rigs: Any) -> None:
    rig = rigs(["sh", "-c", "sleep 60 & sleep 60 & wait"])
    ready = time.monotonic() + 20
    while len(below := descendants(rig.program.pid)) < 2:
        assert time.monotonic() < ready
        time.sleep(0.01)
    os.close(rig.said)
    with pytest.raises(Ended):
        rig.watch.kill("it was enough")
    assert rig.program.wait(20) == -signal.SIGKILL
    assert not left(below, timeout=20)
