"""Small checkpoints, and processes of their own that write them."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dataflow.running.saving.checkpoints import CheckpointStore

ROOT = Path(__file__).parents[2]
# Another package in the environment may have the name 'tests' as well.
_CALL = """
import importlib, sys, types
sys.modules["tests"] = tests = types.ModuleType("tests")
tests.__path__ = ["tests"]
module, name, *arguments = sys.argv[1:]
getattr(importlib.import_module(module), name)(*arguments)
"""


def save(store: CheckpointStore, step: int, text: str = "weights") -> int:
    """Writes a checkpoint with files of all kinds; samples of the next step, if they were kept, are in it."""
    directory = store.begin(step)
    (directory / "trainer").mkdir()
    (directory / "trainer" / "__0_0.distcp").write_bytes(f"{text} of step {step}".encode())
    (directory / "trainer" / ".metadata").write_bytes(b"shapes")
    store.save_states(directory, {"actor": step, "pair": (step, text)})
    if (store.directory / "drawn" / f"step_{step + 1:06}.pkl").exists():
        store.link(step + 1, directory)
    return store.commit(step)


def names(directory: Path) -> list[str]:
    """Returns the names in a directory, hidden ones too."""
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def empty() -> Iterator[Path]:
    """Yields a new directory for each example of hypothesis; pytest's is one for all of them."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "checkpoints"


class Child:
    """A process of its own that calls a function of a module; ended at the end of the block if it still runs.

    Args:
        work: the function; the exit code is 1 if it raises.
        *arguments: of the function, as texts.
        pass_fds: open files that the process has, too.
    """

    def __init__(self, work: Callable[..., object], *arguments: str, pass_fds: Sequence[int] = ()) -> None:
        command = [sys.executable, "-c", _CALL, work.__module__, work.__name__, *arguments]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=pass_fds)
        self.pid = self._process.pid

    def wait(self) -> int:
        """Returns the exit code; a negative one is the signal that ended the process."""
        return self._process.wait(300)

    def kill(self) -> int:
        """Ends it with SIGKILL, and returns its exit code."""
        self._process.kill()
        return self.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def killed_before_each_operation(work: Callable[[], object]) -> Iterator[int]:
    """Does some work in one fork of this process after the other; kills the n-th before its n-th operation on a file.

    To be called in a process of its own, since only one without threads may be forked.

    Yields:
        the exit code of each; the last is the one that did all of the work.
    """
    for number in itertools.count(1):
        pid = os.fork()
        if pid == 0:
            try:
                _kill_at(number)
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        yield code
        if code != -signal.SIGKILL:
            return


def _kill_at(number: int) -> None:
    left = number

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open" or event.startswith(("os.", "shutil.", "fcntl.")):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
