"""The process of the sentinel: asks the agent's process whether it lives, and ends it when user code has frozen it.

Runs by its file, isolated, with nothing but the standard library: it must start fast and hold little memory. Each
question is answered twice: by a thread, which takes Python's lock, and by the event loop. It waits for answers with a
deadline. Who is to blame stands in a page of shared memory: a slot a thread, with a mark while that runs user code.

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
"""Of a slot: the thread's native id, and its identity to Python."""
MARK = struct.Struct("<qqqqq8s")
"""Of a slot: number of the call (0: none runs), kind, step, group, sample, beginning of the request's key."""
SLOT = struct.Struct("<qQqqqqq8s")

_GRACE_S = 2.0  # how long a signal may go unheeded
_PAUSE_S = 1.0  # between two questions
_LOOK_S = 0.5  # between two looks at what does not answer
_STALE_S = 5.0  # a look that comes so late was held up itself: the machine slept, or this process was stopped
_WINDOW_S = 0.5  # in which threads that wait for the lock show by waking every 5 ms
_WAKES = 5
_DUMP_S = 3.0
_THREAD = re.compile(r"(?:Current thread|Thread) 0x([0-9a-f]+)[^\n]*\n((?:  File [^\n]*\n?)*)")
_FRAME = re.compile(r'  File "([^"]*)", line (\d+) in ([^\n]*)')


class Ended(Exception):
    """There is nothing to watch any more."""


class Watch:
    def __init__(self, options: dict) -> None:
        self.pid = options["pid"]
        self.after_s = options["after_s"]
        self.inline = options["inline"]
        self.record, self.words = options["record"], options["words"]
        self.machinery, self.ours = tuple(options["machinery"]), options["ours"]
        self.signal, self.dump = options["signal"], options["dump"]
        self.socket = socket.socket(fileno=options["socket"])
        self.wakes = None if options["wakes"] is None else socket.socket(fileno=options["wakes"])
        self.page = mmap.mmap(options["page"], 0, access=mmap.ACCESS_READ)
        self.steps: dict[int, str] = {}
        self.answers: set[bytes] = set()
        self.said = False
        self.poll = select.poll()
        self.poll.register(self.socket, select.POLLIN)
        with contextlib.suppress(AttributeError, OSError):  # not Linux: the end of the socket tells
            self.poll.register(os.pidfd_open(self.pid), select.POLLIN)

    def run(self) -> None:
        pause_s = _PAUSE_S if self.after_s is None else min(_PAUSE_S, self.after_s / 4)
        look_s = _LOOK_S if self.after_s is None else min(_LOOK_S, self.after_s / 4)
        number = 0
        while True:
            number += 1
            question = b"%d" % number
            self.answers.clear()
            self.send(question)
            self.asked = self.looked = time.monotonic()
            self.held = (0, 0.0)  # call that holds up the loop, and since when it was seen to
            while {b"g" + question, b"l" + question} - self.answers:
                self.wait(look_s)
                self.look(b"g" + question in self.answers, b"l" + question in self.answers)
            end = time.monotonic() + pause_s
            while (left := end - time.monotonic()) > 0:
                self.wait(left)

    def send(self, message: bytes) -> None:
        try:
            self.socket.send(message)
        except OSError:
            raise Ended from None

    def wait(self, seconds: float) -> None:
        """Waits for a message, or so long, and takes all that have come."""
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

    def look(self, lock_free: bool, loop_free: bool) -> None:
        """Sees whether what has not answered is frozen."""
        now, before = time.monotonic(), self.looked
        self.looked = now
        if loop_free and lock_free:
            return
        if now - before > _STALE_S or self.state() in "tT":
            self.asked, self.held = now, (0, now)
            return
        if not lock_free:
            self.judge(now - self.asked, "lock")
            return
        call = self.slot(0)[2]
        if call != self.held[0]:
            self.held = (call, now)
        if call:
            self.judge(now - self.held[1], "loop")

    def judge(self, frozen_s: float, what: str) -> None:
        signalled = self.signalled() if frozen_s >= _GRACE_S else 0
        if not signalled and (self.after_s is None or frozen_s < self.after_s):
            return
        guilty = self.slot(0) if what == "loop" else self.holder()
        if what == "lock" and any(answer[:1] == b"g" for answer in self.answers):
            return  # it has let go meanwhile
        if guilty is not None:
            self.end(guilty, what, frozen_s, signalled)
        elif signalled:
            self.say(f"{_interrupted(signalled)} while something keeps Python's lock; the process was ended")
            self.kill()
        elif not self.said:
            self.said = True
            self.say(
                f"nothing in process {self.pid} has run for {frozen_s:.0f} s, as something keeps Python's lock that is "
                "no reward function"
            )

    # --- who it is ----------------------------------------------------------------------------------------

    def slot(self, number: int) -> tuple:
        return SLOT.unpack_from(self.page, number * SLOT.size)

    def holder(self) -> tuple | None:
        """Returns the slot of the thread that keeps the lock: of those in user code one that does not wait for it."""
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
                found.append((0, slot[2], slot))  # not Linux: all may be it
            elif new[0] - old[0] < _WAKES:
                found.append((new[1] - old[1], slot[2], slot))
        # The one that computes; of those that sleep, the one that was called last.
        return max(found)[2] if found else None

    def usage(self, thread: int) -> tuple[int, int] | None:
        """Returns how often a thread went to sleep, and its time on a processor; None where that is not told."""
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
        """Returns a signal that the event loop was sent and has not read: it is looked at, not taken away."""
        if self.wakes is None:
            return 0
        try:
            waiting = self.wakes.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            return 0
        return next((number for number in waiting if number in (signal.SIGINT, signal.SIGTERM)), 0)

    def place(self, thread: int) -> tuple[str, str]:
        """Returns the function of the user's that a thread is in, and its file and line, if that can be told."""
        frames = _FRAME.findall(dict(_THREAD.findall(self.stacks())).get(f"{thread:016x}", ""))
        # The frame that our own code called last: those outside of it run the thread.
        inner = list(itertools.takewhile(lambda frame: not frame[0].startswith(self.ours), frames))
        users = [frame for frame in reversed(inner) if not frame[0].startswith(self.machinery)]
        if not users:
            return "a reward function", ""
        file, line, function = users[0]
        return f"'{function}'", f" ({os.path.basename(file)}:{line})"

    def stacks(self) -> str:
        """Returns the stacks of all threads, as Python's fault handler writes them for a signal, without the lock."""
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

    # --- what is done about it ----------------------------------------------------------------------------

    def end(self, slot: tuple, what: str, frozen_s: float, signalled: int) -> None:
        _thread, ident, _call, kind, step, group, sample, key = slot
        function, place = self.place(ident)
        step = self.steps.get(step, step)
        of = f"group {group} of step {step}"
        who = f"sample {sample} of {of}" if sample >= 0 else of
        if what == "lock":
            how = f"has kept Python's lock for {frozen_s:.0f} s, so that nothing else in its process could run"
            fix = "run it in processes of its own with reward.manager=remote"
        else:
            how = f"has held up the event loop for {frozen_s:.0f} s, so that no other call and no time-out went on"
            fix = "await what it waits for there, write it as a plain def, or set reward.manager=remote"
        if signalled:
            self.say(f"{_interrupted(signalled)}: {function}{place}, called for {who}, {how}; the process was ended")
            self.kill()
            return
        story = f"{function}{place} {how} (reward.frozen_after); the process was ended; {fix}."
        facts = {"kind": kind, "step": step, "group": group, "sample": sample, "key": key.rstrip(b"\0").hex()}
        if self.record is not None:
            with contextlib.suppress(OSError), open(self.record, "a") as file:
                # On a line of its own, also behind one that was cut off.
                file.write("\n" + json.dumps({**facts, "story": story}) + "\n")
                file.flush()
                os.fsync(file.fileno())
        if self.words is not None:
            with contextlib.suppress(OSError):  # a machine that the run's own directory is not on
                Path(self.words).write_text(f"{who}: {story}")
        self.say(f"{who}: {story}")
        self.kill()

    def say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"\ndataflow: {text.rstrip('.')}.\n".encode())

    def kill(self) -> None:
        """Ends the process, and what it has started."""
        for pid in [self.pid, *descendants(self.pid)]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if pid != os.getpid():
                    os.kill(pid, signal.SIGKILL)
        raise Ended


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, directly or not, as far as the system tells."""
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


def _interrupted(number: int) -> str:
    return f"interrupted by {signal.Signals(number).name}"


if __name__ == "__main__":
    with contextlib.suppress(Ended):
        Watch(json.loads(sys.argv[1])).run()
