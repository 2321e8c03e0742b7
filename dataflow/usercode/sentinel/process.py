"""The sentinel's process: pings the process that it watches and ends it when user code has frozen it.

It runs as a script, isolated, with the standard library only, to start fast and use little memory. Each ping is
answered twice: by a thread, which needs Python's lock (the GIL), and by the event loop. The answers have a deadline.
While the loop has not answered, further pings go to the thread alone: the lock may be taken after its first answer, and
then the loop cannot answer either.
The responsible call is found in a page of shared memory, with a slot per thread that holds a mark while the thread runs
user code.

The other side is sentinel.py.
"""

import contextlib
import itertools
import json
import mmap
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

THREAD = struct.Struct("<qQ")
"""First part of a slot: the thread's native id, and its ``threading.get_ident()``."""
MARK = struct.Struct("<qqqqq8s")
"""Rest of a slot: number of the call (0: none), kind, step, group, sample, first bytes of the request's key."""
SLOT = struct.Struct("<qQqqqqq8s")

LOCK_ONLY = b"-"
"""First byte of a ping that the thread alone answers."""

_GRACE_S = 2.0  # how long a signal may stay unhandled
_PAUSE_S = 1.0  # between two pings
_CHECK_S = 0.5  # between two checks of a process that does not answer
_STALE_S = 5.0  # a check this late was itself delayed: the machine slept, or this process was stopped
_WINDOW_S = 0.5  # in which a thread that waits for the lock wakes every 5 ms
_WAKES = 5
_DUMP_S = 3.0
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  File [^\n]*\n?)*)")
_FRAME = re.compile(r'  File "([^"]*)", line (\d+) in ([^\n]*)')


class Ended(Exception):
    """The watched process has ended or closed the sentinel."""


class Watch:
    def __init__(self, options: dict) -> None:
        self.pid = options["pid"]
        self.after_s = options["after_s"]
        self.inline = options["inline"]
        self.record, self.reason, self.watched = options["record"], options["reason"], options["watched"]
        self.machinery, self.ours = tuple(options["machinery"]), options["ours"]
        self.signal, self.dump = options["signal"], options["dump"]
        self.socket = socket.socket(fileno=options["socket"])
        self.wakes = None if options["wakes"] is None else socket.socket(fileno=options["wakes"])
        self.page = mmap.mmap(options["page"], 0, access=mmap.ACCESS_READ)
        self.channel = options["channel"]
        self.steps: dict[int, str] = {}
        self.answers: set[bytes] = set()
        self.reported = False
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)
        with contextlib.suppress(AttributeError, OSError):  # not Linux: the end of the socket is enough
            self.poll.register(os.pidfd_open(self.pid), select.POLLIN)

    def run(self) -> None:
        pause_s = _PAUSE_S if self.after_s is None else min(_PAUSE_S, self.after_s / 4)
        check_s = _CHECK_S if self.after_s is None else min(_CHECK_S, self.after_s / 4)
        number = 0
        while True:
            number += 1
            ping = lock_ping = b"%d" % number
            self.answers.clear()
            self.send(ping)
            self.pinged = self.checked = time.monotonic()
            self.held = (0, 0.0)  # the call that blocks the loop, and since when
            while {b"g" + lock_ping, b"l" + ping} - self.answers:
                self.wait(check_s)
                self.check(b"g" + lock_ping in self.answers, b"l" + ping in self.answers)
                if b"g" + lock_ping in self.answers and time.monotonic() - self.pinged >= check_s:
                    self.answers.discard(b"g" + lock_ping)
                    number += 1
                    lock_ping = LOCK_ONLY + b"%d" % number
                    self.pinged = time.monotonic()
                    self.send(lock_ping)
            end = time.monotonic() + pause_s
            while (left := end - time.monotonic()) > 0:
                self.wait(left)

    def send(self, message: bytes) -> None:
        try:
            self.socket.send(message)
        except OSError:
            raise Ended from None

    def wait(self, seconds: float) -> None:
        """Waits up to ``seconds`` for a message and reads all that have arrived."""
        ready = {fd for fd, _ in self.poll.poll(seconds * 1000)}
        if ready - {self.socket.fileno()}:
            raise Ended
        while ready:
            try:
                message = self.socket.recv(4096, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                raise Ended from None
            if not message:
                raise Ended
            if message[:1] == b"s":
                number, name = json.loads(message[1:])
                self.steps[number] = name
            else:
                self.answers.add(message)

    def check(self, lock_free: bool, loop_free: bool) -> None:
        """Checks whether the process is frozen, given which of its two answers have arrived."""
        now, before = time.monotonic(), self.checked
        self.checked = now
        if loop_free and lock_free:
            return
        if now - before > _STALE_S or self.state() in "tT":
            self.pinged, self.held = now, (0, now)
            return
        if not lock_free:
            self.decide(now - self.pinged, "lock")
            return
        call = self.slot(0)[2]
        if call != self.held[0]:
            self.held = (call, now)
        if call:
            self.decide(now - self.held[1], "loop")

    def decide(self, frozen_s: float, what: str) -> None:
        signalled = self.signalled() if frozen_s >= _GRACE_S else 0
        if not signalled and (self.after_s is None or frozen_s < self.after_s):
            return
        frozen = self.slot(0) if what == "loop" else self.holder()
        if what == "lock" and any(answer[:1] == b"g" for answer in self.answers):
            return  # the lock was released meanwhile
        if frozen is not None:
            self.end(frozen, what, frozen_s, signalled)
        elif signalled:
            self.kill("something kept Python's lock; the process was ended", signalled)
        elif not self.reported:
            self.reported = True
            self.report(
                f"nothing in process {self.pid} has run for {frozen_s:.0f} s, as something other than "
                f"{self.watched['function']} keeps Python's lock"
            )

    # --- the responsible call ----------------------------------------------------------------------------------------

    def slot(self, number: int) -> tuple:
        return SLOT.unpack_from(self.page, number * SLOT.size)

    def holder(self) -> tuple | None:
        """Returns the slot of the thread that holds the lock: one in user code that does not wait for the lock."""
        busy = []
        for number in range(len(self.page) // SLOT.size):
            slot = self.slot(number)
            if not slot[0]:
                break
            if slot[2]:
                busy.append(slot)
        before = {slot[0]: self.usage(slot[0]) for slot in busy}
        end = time.monotonic() + _WINDOW_S
        while (left := end - time.monotonic()) > 0:
            self.wait(left)
        found = []
        for slot in busy:
            old, new = before[slot[0]], self.usage(slot[0])
            if old is None or new is None:
                found.append((0, slot[2], slot))  # not Linux: any thread may hold it
            elif new[0] - old[0] < _WAKES:
                found.append((new[1] - old[1], slot[2], slot))
        # The thread that computes; if all sleep, the one with the latest call.
        return max(found)[2] if found else None

    def usage(self, thread: int) -> tuple[int, int] | None:
        """Returns how often a thread went to sleep and its CPU time; None on other systems than Linux."""
        try:
            status = Path(f"/proc/{self.pid}/task/{thread}/status").read_text()
            times = Path(f"/proc/{self.pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()
            sleeps = int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.M)[1])
            return sleeps, int(times[11]) + int(times[12])
        except (OSError, LookupError, TypeError, ValueError):
            return None

    def state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "?"

    def signalled(self) -> int:
        """Returns a signal that the event loop has not read yet, without consuming it."""
        if self.wakes is None:
            return 0
        try:
            waiting = self.wakes.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return 0
        return next((number for number in waiting if number in (signal.SIGINT, signal.SIGTERM)), 0)

    def place(self, thread: int) -> tuple[str, str]:
        """Returns the user's function that a thread runs, and its file and line if known."""
        frames = _FRAME.findall(dict(_THREAD.findall(self.stacks())).get(f"{thread:016x}", ""))
        # The frames inside the last call from our own code.
        inner = list(itertools.takewhile(lambda frame: not frame[0].startswith(self.ours), frames))
        users = [frame for frame in reversed(inner) if not frame[0].startswith(self.machinery)]
        if not users:
            return self.watched["function"], ""
        file, line, function = users[0]
        return f"'{function}'", f" ({os.path.basename(file)}:{line})"

    def stacks(self) -> str:
        """Returns the stacks of all threads, which faulthandler writes on a signal without needing the lock."""
        if self.signal is None:
            return ""
        os.kill(self.pid, self.signal)
        text, end, poll = b"", time.monotonic() + _DUMP_S, select.poll()
        poll.register(self.dump, select.POLLIN)
        quiet_s = _DUMP_S
        while time.monotonic() < end and poll.poll(quiet_s * 1000):
            text += os.read(self.dump, 1 << 16)
            quiet_s = 0.2
        return text.decode(errors="replace")

    # --- the end of the process ----------------------------------------------------------------------------

    def end(self, slot: tuple, what: str, frozen_s: float, signalled: int) -> None:
        _thread, ident, _call, kind, step, group, sample, key = slot
        function, place = self.place(ident)
        step = self.steps.get(step, step)
        of = f"group {group} of step {step}"
        request = f"sample {sample} of {of}" if sample >= 0 else of
        if what == "lock":
            how = f"has kept Python's lock for {frozen_s:.0f} s, so that nothing else in its process could run"
            fix = self.watched["lock_fix"]
        else:
            how = f"has blocked the event loop for {frozen_s:.0f} s, with every other call and all time-outs"
            fix = self.watched["loop_fix"]
        if signalled:
            self.kill(f"{function}{place}, called for {request}, {how}; the process was ended", signalled)
        story = f"{function}{place} {how} ({self.watched['key']}); the process was ended; {fix}."
        facts = {"kind": kind, "step": step, "group": group, "sample": sample, "key": key.rstrip(b"\0").hex()}
        if self.record is not None:
            with contextlib.suppress(OSError), open(self.record, "a") as file:
                # The leading newline separates it from a truncated line. No fsync: the page cache outlives the process,
                # and a disk that stalls for minutes would keep the frozen process alive.
                file.write("\n" + json.dumps({**facts, "story": story}) + "\n")
        if self.reason is not None:
            with contextlib.suppress(OSError):  # the run's directory is on another machine
                Path(self.reason).write_text(f"{request}: {story}")
        self.kill(f"{request}: {story}")

    def report(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"\ndataflow: {text.rstrip('.')}.\n".encode())

    def kill(self, why: str, signalled: int = 0) -> None:
        """Kills the process and its descendants; its supervisor, if it has one, reports why."""
        if self.channel is None:
            self.report(f"interrupted by {signal.Signals(signalled).name}: {why}" if signalled else why)
        else:
            with contextlib.suppress(OSError):  # the supervisor was killed
                os.write(self.channel, (json.dumps({"killed": why.rstrip(".")}) + "\n").encode())
        for pid in [self.pid, *descendants(self.pid)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        raise Ended


def descendants(pid: int) -> list[int]:
    """Returns the ids of the descendants of a process; none on other systems than Linux."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError, IndexError, ValueError):
                parent = int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    found, left = [], [pid]
    while left:
        mine = children.get(left.pop(), [])
        found += mine
        left += mine
    return found


if __name__ == "__main__":
    with contextlib.suppress(Ended):
        Watch(json.loads(sys.argv[1])).run()
