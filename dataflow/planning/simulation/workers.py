"""Child processes that run jobs. They share nothing with this one, so that any program may start them.

They import only this package: neither the program that runs nor what it has loaded (a notebook, Ray, torch).
"""

from __future__ import annotations

import io
import pickle
import subprocess
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any, BinaryIO, Generic, TypeVar

from dataflow.system.children import command

Job = TypeVar("Job")
Result = TypeVar("Result")


class Worker(Generic[Job, Result]):
    """A process that runs one job after the other.

    Args:
        take: waits for the next job and returns it; None if there are no more.
        done: called with a job and its result; None if the process could not run it.
    """

    def __init__(self, take: Callable[[], Job | None], done: Callable[[Job, Result | None], None]) -> None:
        self._take, self._done = take, done
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command("dataflow.planning.simulation"), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
        self._thread = threading.Thread(target=self._run, name="plan", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._thread.join()
        self._process.communicate()

    def _run(self) -> None:
        while (job := self._take()) is not None:
            result = self._ask(job)
            self._done(job, result)
            if result is None:
                return

    def _ask(self, job: Job) -> Result | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(_dumped(job))
            self._process.stdin.flush()
            found: Result | None = pickle.load(self._process.stdout)
        except (OSError, EOFError, ValueError, TypeError, AttributeError, pickle.PickleError):
            return None  # it was ended, or did not start
        return found


def serve(jobs: BinaryIO, results: BinaryIO) -> None:
    """Runs the jobs that another process writes, until that ends."""
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        try:
            result = job.run()
        except Exception:
            result = None  # the process that asks runs it again, and raises what this one cannot
        pickle.dump(result, results)
        results.flush()


class _Pickler(pickle.Pickler):
    """Leaves out functions: those of stages cannot be pickled, and a simulation calls none."""

    def reducer_override(self, value: Any) -> Any:
        return (_function, ()) if isinstance(value, FunctionType) and value is not _function else NotImplemented


def _function() -> Callable[..., None]:
    return _left_out


def _left_out(*_arguments: Any, **_keys: Any) -> None:
    raise NotImplementedError("functions of stages are left out of simulations")


def _dumped(job: object) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(job)
    return file.getvalue()
