"""Small checkpoints, and processes of their own that write them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dataflow.running.saving.checkpoints import CheckpointStore


def save(store: CheckpointStore, step: int, text: str = "weights") -> int:
    """Writes a checkpoint with files of all kinds; samples of the next step, if they were kept, are in it."""
    directory = store.begin(step)
    (directory / "trainer").mkdir()
    (directory / "trainer" / "__0_0.distcp").write_bytes(f"{text} of step {step}".encode())
    (directory / "trainer" / ".metadata").write_bytes(b"shapes")
    store.save_states(directory, {"actor": step, "pair": (step, text)})
    if (store.directory / "drawn" / f"step_{step + 1:06}.pkl").exists():
        store.link(step + 1, directory)
    return store.commit(step, {"steps": step})


def names(directory: Path) -> list[str]:
    """Returns the names in a directory, hidden ones too."""
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def empty() -> Iterator[Path]:
    """Yields a new directory for each example of hypothesis; pytest's is one for all of them."""
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory) / "checkpoints"


class Child:
    """A process of its own that does some work; ended at the end of the block if it still runs.

    Args:
        work: what it does; its exit code is 1 if that raises.
        kill_at: it kills itself just before the file operation of this number, counted from 1; None for never.
    """

    def __init__(self, work: Callable[[], object], kill_at: int | None = None) -> None:
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                if kill_at is not None:
                    _kill_at(kill_at)
                work()
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)

    def wait(self) -> int:
        """Returns the exit code; a negative one is the signal that ended the process."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code

    def kill(self) -> int:
        """Ends it with SIGKILL, and returns its exit code."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
        return self.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _kill_at(number: int) -> None:
    left = number

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open" or event.startswith(("os.", "shutil.", "fcntl.")):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
