"""Pool: worker processes for reward functions that keep a core busy, each at one call at a time.

Every call ends in exactly one of: answered, failed with its worker, given up. A worker that dies, or is killed
because the caller gave up, takes no other call with it, and the next call finds a new one in its place. No worker
outlives the process that started it, however that one ends.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import signal
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from dataflow.errors import ConfigError, RewardFailed, nearest
from dataflow.rewards.user.worker import Outcome, Recipe, WorkerError, read_reply, work
from dataflow.system.children import safe_path
from dataflow.usercode.load import describe

START_METHODS = ("spawn", "forkserver")
"""Not fork: it copies the locks that the run's other threads hold at that moment."""

START_S = 300.0
"""What a worker may take to load the reward."""

GRACE_S = 2.0
"""What a worker may take to end by itself when the pool is closed."""

_CLOSED = "the pool of reward workers was closed during the call."


class WorkerDied(RewardFailed):
    """The process that ran the call ended before it answered. Another one may do better."""

    retry = True
    fix = "see whether memory ran out, or what in the function ends the process"


class Pool:
    """Worker processes that call one function; calls that find none free wait, the first come first.

    Only workers that are ready take calls; they start with :meth:`start`, or with the first call. A call that is
    cancelled while it runs is stopped by killing its worker with whatever that has started: nothing else stops code
    that keeps a core busy.

    Args:
        recipe: of the reward that each worker builds for itself.
        workers: processes.
        start_method: ``spawn`` or ``forkserver``.

    Attributes:
        counts: ``died``, workers that ended by themselves; ``killed``, those whose call was given up.

    Raises:
        ConfigError: a number of workers below 1, another start method, a recipe that cannot be sent.
    """

    def __init__(self, recipe: Recipe, workers: int, start_method: str = "spawn") -> None:
        if workers < 1:
            raise ConfigError(f"reward manager 'remote': workers={workers}; give 1 or more.")
        if start_method not in START_METHODS:
            hint = nearest(start_method, START_METHODS) or f"; give {' or '.join(START_METHODS)}."
            raise ConfigError(f"reward manager 'remote': start_method '{start_method}' cannot be used{hint}")
        try:
            pickle.dumps(recipe)
        except Exception as error:
            raise ConfigError(
                f"reward '{recipe.name}': its arguments cannot be sent to another process ({describe(error)})."
            ) from error
        self.workers = workers
        self.counts: Counter[str] = Counter()
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._workers = [_Worker(self._calls, recipe, start_method, self.counts) for _ in range(workers)]
        self._started = self._closed = False

    def start(self) -> None:
        """Starts the workers, if that has not been done; returns at once."""
        if not self._started and not self._closed:
            self._started = True
            for worker in self._workers:
                worker.start()

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        """Returns what the function returns for these keywords; cancel it to give up on it.

        Raises:
            WorkerDied: the worker ended before it answered.
            WorkerError: the arguments or what came of them cannot be sent.
            Exception: what the function raised, with the worker's traceback as its cause.
        """
        if self._closed:
            raise WorkerError("the pool of reward workers was closed before this call.")
        self.start()
        call = _Call(arguments)
        self._calls.put(call)
        try:
            result, error = await asyncio.wrap_future(call.outcome)
        except asyncio.CancelledError:
            if not call.outcome.cancel():  # it runs, or has just ended
                for worker in self._workers:
                    worker.give_up(call)
            raise
        if error is not None:
            raise error
        return result

    def close(self) -> None:
        """Ends the workers and waits for them: the idle ones by themselves, the others are killed."""
        self._closed = True
        for worker in self._workers:
            worker.stop()
            self._calls.put(None)
        for worker in self._workers:
            if worker.is_alive():
                worker.join(2 * GRACE_S)


@atexit.register
def _at_exit() -> None:
    """Ends what nobody closed. multiprocessing's own handler, which runs after this one, would wait for it."""
    for thread in threading.enumerate():
        if isinstance(thread, _Worker):
            thread.stop(idle_too=True)


class _Call:
    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = arguments
        self.outcome: Future[Outcome] = Future()


class _Worker(threading.Thread):
    """The thread of ours that hands a process one call after the other."""

    def __init__(
        self, calls: queue.SimpleQueue[_Call | None], recipe: Recipe, start_method: str, counts: Counter[str]
    ) -> None:
        super().__init__(name="reward-worker", daemon=True)
        self._calls = calls
        self._recipe = recipe
        self._context: Any = multiprocessing.get_context(start_method)
        self._counts = counts
        # Holds what follows together: a call is given up on the event loop's thread.
        self._lock = threading.Lock()
        self._call: _Call | None = None
        self._child: _Child | None = None
        self._given_up = False
        self._stopped = False

    def run(self) -> None:
        while True:
            # Before it takes a call: a start may take longer than a call may, and another worker may be idle.
            failed = self._start()
            call = self._calls.get()
            if call is None:
                break
            if self._take(call):
                outcome = (None, failed) if failed is not None else self._serve(call)
                self._finish()
                call.outcome.set_result(outcome)
                del outcome
            del call  # an idle worker must not keep the last call's samples
        if child := self._released():
            child.end()

    def _take(self, call: _Call) -> bool:
        with self._lock:
            wanted = call.outcome.set_running_or_notify_cancel()
            if wanted:
                self._call, self._given_up = call, False
        return wanted

    def _finish(self) -> None:
        with self._lock:
            self._call = None
            given_up = self._given_up
        # It may have been after the answer: the next call must not go to a dying process.
        if given_up and (child := self._released()):
            self._bury(child)

    def give_up(self, call: _Call) -> None:
        """Kills the process if it is at work on this call."""
        with self._lock:
            if self._call is call:
                self._kill()

    def stop(self, *, idle_too: bool = False) -> None:
        """Lets no process start any more, and kills the one that is there unless it is idle."""
        with self._lock:
            self._stopped = True
            idle = self._call is None and self._child is not None and self._child.up
            if idle_too or not idle:
                self._kill()

    def _kill(self) -> None:
        self._given_up = True
        if self._child is not None:
            self._child.given_up = True
            self._child.kill()

    def _released(self) -> _Child | None:
        with self._lock:
            child, self._child = self._child, None
        return child

    def _serve(self, call: _Call) -> Outcome:
        try:
            message = pickle.dumps(dict(call.arguments))
        except Exception as error:
            return None, WorkerError(f"the arguments of the call cannot be sent to a worker: {describe(error)}.")
        failed = self._start()  # another one, if this one died while it was idle
        if failed is not None:
            return None, failed
        reply = self._child.ask(message) if self._child is not None else None
        return self._lost() if reply is None else read_reply(reply)

    def _start(self) -> RewardFailed | None:
        """Sees to it that there is a process that is ready for a call; returns what keeps it from it."""
        with self._lock:
            if self._child is not None and self._child.ended():
                self._bury(self._child)
                self._child = None
            if self._stopped:
                return WorkerError(_CLOSED)
            try:
                child = self._child = self._child or _Child(self._context, self._recipe)
            except Exception as error:
                return WorkerError(f"no worker process can be started: {describe(error)}.")
        if child.wait_up():
            return None
        failed = self._lost()[1]
        if isinstance(failed, WorkerDied):
            failed.fix = "see what it printed; a script that starts a run does so under if __name__ == '__main__'"
        return failed

    def _lost(self) -> tuple[None, RewardFailed]:
        child = self._released()
        how = self._bury(child) if child is not None else "was not there"
        if self._stopped:
            return None, WorkerError(_CLOSED)
        when = "during a call" if child is None or child.up else "before it was ready"
        return None, WorkerDied(f"the worker process {how} {when}.")

    def _bury(self, child: _Child) -> str:
        if not self._stopped:
            self._counts["killed" if child.given_up else "died"] += 1
        return child.end()


class _Child:
    """A started process, and our end of the pipe to it."""

    def __init__(self, context: Any, recipe: Recipe) -> None:
        self.up = self.given_up = False
        self._pipe, theirs = context.Pipe()
        # No daemon process in multiprocessing's sense: those may not start others, as graders of programs do.
        self._process = context.Process(target=work, args=(theirs, recipe), name="reward-worker", daemon=False)
        try:
            with safe_path():
                self._process.start()
        finally:
            theirs.close()
        self._pidfd: int | None = None
        # The pipes to a process stay open beyond its end while anything that it has started holds them.
        with suppress(AttributeError, OSError):  # not Linux, or over already
            self._pidfd = os.pidfd_open(self._process.pid)
        self._end = self._process.sentinel if self._pidfd is None else self._pidfd

    def ask(self, message: bytes) -> bytes | None:
        """Sends a call and returns the reply, or None if the process ended before it gave one."""
        try:
            self._pipe.send_bytes(message)
        except OSError:
            return None
        return self._heard()

    def wait_up(self) -> bool:
        """Waits until the process is ready; False if it ends before, or takes more than START_S."""
        self.up = self.up or self._heard(START_S) is not None
        return self.up

    def _heard(self, deadline_s: float | None = None) -> bytes | None:
        multiprocessing.connection.wait([self._pipe, self._end], deadline_s)
        heard: bytes | None = None
        with suppress(EOFError, OSError):  # it has ended
            heard = self._pipe.recv_bytes() if self._pipe.poll() else None
        return heard

    def ended(self) -> bool:
        return bool(multiprocessing.connection.wait([self._end], 0))

    def kill(self) -> None:
        """Ends the process, and what it has started, at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has no group of its own yet
            self._process.kill()

    def end(self) -> str:
        """Lets an idle process end, or kills it, and returns how it ended."""
        self._pipe.close()
        multiprocessing.connection.wait([self._end], GRACE_S)
        self.kill()  # also for what it has started
        self._process.join()
        if self._pidfd is not None:
            os.close(self._pidfd)
        code: int | None = self._process.exitcode
        if code is None:
            return "ended"  # somebody else has asked for its exit code
        return f"ended with exit code {code}" if code >= 0 else f"was ended by signal {-code}"
